"""Limits of one request, one client and one connection. All of them are checked before the work is done.

The event loop judges a request by sizes alone: a prompt that cannot fit is not tokenised. The server's
`--slots` and `--context` are further limits.
"""

# --- a request
# bytes of a body for each token of the context: 16 characters, some of them as JSON's \uXXXX
BYTES_PER_TOKEN = 128
LEAST_BODY = 64 << 10  # bytes that every body may have
CHARACTERS_PER_TOKEN = 16  # the longest token of the shipped tokenizer; English text has 4
MAX_ANSWERS = 128  # prompts x n
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 128
MAX_TOOLS = 128
MAX_SCHEMA_CHARACTERS, MAX_SCHEMA_DEPTH = 8192, 64  # of an answer in JSON

# --- clients
MAX_WAITING = 512  # waiting requests; one client may have half of them; further ones get a 429
RETRY_AFTER = 5  # seconds that a 429 asks to wait
REQUEST_LEAVES = 4  # one request leaves a quarter of the slots to other requests
CLIENT_LEAVES = 8  # one client leaves an eighth of the slots to other clients
TOKENISE_SECONDS = 0.05  # for tokenising in the decoding thread, between two steps

# --- connections
MAX_CONNECTIONS = 1024  # fewer if the process has fewer file descriptors
RESERVED_DESCRIPTORS = 64  # for weights, metrics files, and connections that are being accepted
IDLE_SECONDS = 30  # to send the head of a request; an unused connection is closed then
BODY_SECONDS = 30  # to send the body
READ_SECONDS = 30  # in which a client that stopped reading its answer must read on
MAX_DRAINED = 1 << 20  # bytes of a body that may follow its response; with more, the connection is closed
GRACE = 30  # seconds to finish the answers when the server ends


def max_body(context: int) -> int:
    """Limit of the bytes of a request."""
    return max(LEAST_BODY, BYTES_PER_TOKEN * context)


def max_characters(context: int) -> int:
    """Limit of the characters of a prompt. They are counted before it is rendered, and again before it is
    tokenised."""
    return CHARACTERS_PER_TOKEN * context


def max_answers(slots: int) -> int:
    """Limit of the answers to one prompt, which are generated together."""
    return max(1, slots - slots // CLIENT_LEAVES)
