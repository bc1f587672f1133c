"""How much one request, one client and one connection may cost; all of it is checked before the work is done.

A request is judged in the event loop by sizes alone: a prompt that cannot fit is not tokenised. `--slots`
and `--context` of the server are the other two limits.
"""

# --- a request
# of a body, for each token of the context: 16 characters, some of them as JSON's \uXXXX
BYTES_PER_TOKEN = 128
LEAST_BODY = 64 << 10  # bytes that a body may always have
CHARACTERS_PER_TOKEN = 16  # the longest token of the shipped tokenizer; English text has 4
MAX_ANSWERS = 128  # prompts x n
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 128
MAX_TOOLS = 128
MAX_SCHEMA_CHARACTERS, MAX_SCHEMA_DEPTH = 8192, 64  # of an answer in JSON

# --- clients
MAX_WAITING = 512  # requests beside those being answered, of one client half of them; more get a 429
RETRY_AFTER = 5  # seconds, that a 429 advises
REQUEST_LEAVES = 4  # one request leaves a quarter of the slots to other requests,
CLIENT_LEAVES = 8  # and all of one client an eighth to other clients
TOKENISE_SECONDS = 0.05  # of the decoding thread, between two steps

# --- connections
MAX_CONNECTIONS = 1024  # fewer if the process has fewer file descriptors
RESERVED_DESCRIPTORS = 64  # for weights, metrics files, and connections that are accepted this moment
IDLE_SECONDS = 30  # until the head of a request must have arrived, and a kept connection is closed
BODY_SECONDS = 30  # until its body must have arrived
READ_SECONDS = 30  # until a client must go on reading its answer
MAX_DRAINED = 1 << 20  # bytes of a body that still come when its response is sent; then it is closed
GRACE = 30  # seconds that answers have when the server ends


def max_body(context: int) -> int:
    """Bytes of a request."""
    return max(LEAST_BODY, BYTES_PER_TOKEN * context)


def max_characters(context: int) -> int:
    """Characters of a prompt, counted before it is rendered and before it is tokenised."""
    return CHARACTERS_PER_TOKEN * context


def max_answers(slots: int) -> int:
    """Answers to one prompt, which are written together."""
    return max(1, slots - slots // CLIENT_LEAVES)
