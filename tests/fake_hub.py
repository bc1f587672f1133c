"""A hub on the loopback: the endpoints of Hugging Face that huggingface_hub uses. As a program it prints the local
copy of a path on a hub."""

import hashlib
import json
import os
import re
import sys
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from common.command_line import one_line_errors
from common.hub import local_path

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/?]+)(?:/(revision|tree)/([^/?]+).*)?")
# for forked processes: huggingface_hub was loaded before the variables of the hub were set
FRESH = """
for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
    del sys.modules[name]
"""
FILE = re.compile(r"/(models/|datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """repositories: `datasets/owner/name` or `models/owner/name` -> {file: content}. gated: names of those
    that may not be read. cut: answers end after so many bytes. requests: (method, path, range, status)."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories, self.gated, self.cut = repositories, set(), None
        self.requests: list[tuple[str, str, str | None, int]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, content=b"", **headers):
                hub.requests.append((self.command, self.path, self.headers["Range"], status))
                self.send_response(status)
                for name, value in {"Content-Length": len(content), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if hub.cut is not None and len(content) > hub.cut:
                    self.wfile.write(content[: hub.cut])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return
                self.wfile.write(content)

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                if match := API.fullmatch(self.path):
                    kind, repo, what, revision = match.groups()
                    self.about(f"{kind}/{repo}", what or "revision", revision or "main")
                elif match := FILE.fullmatch(self.path):
                    kind, repo, revision, name = match.groups()
                    self.file(f"{kind or 'models/'}{repo}", revision, name)
                else:
                    self.answer(404)

            def refused(self, repo, revision):
                if repo not in hub.repositories:
                    self.answer(404, X_Error_Code="RepoNotFound")
                elif repo in hub.gated:
                    self.answer(403, X_Error_Code="GatedRepo")
                elif revision not in ("main", hub.commit(repo)):
                    self.answer(404, X_Error_Code="RevisionNotFound")
                else:
                    return False
                return True

            def about(self, repo, what, revision):
                if self.refused(repo, revision):
                    return
                files = hub.repositories[repo]
                if what == "revision":
                    names = [{"rfilename": name} for name in files]
                    found = {"id": repo.partition("/")[2], "sha": hub.commit(repo), "siblings": names}
                else:
                    found = [
                        {"type": "file", "path": name, "size": len(content), "oid": digest(content)[:40]}
                        for name, content in files.items()
                    ]
                self.answer(200, json.dumps(found).encode(), Content_Type="application/json")

            def file(self, repo, revision, name):
                if self.refused(repo, revision):
                    return
                if name not in hub.repositories[repo]:
                    self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=hub.commit(repo))
                    return
                content = hub.repositories[repo][name]
                about = {"ETag": f'"{digest(content)}"', "X_Repo_Commit": hub.commit(repo)}
                begin = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
                is_same = self.headers["If-Range"] in (None, about["ETag"])
                if begin and is_same and int(begin[1]) >= len(content):
                    self.answer(416)
                elif begin and is_same:
                    rest = content[int(begin[1]) :]
                    span = f"bytes {begin[1]}-{len(content) - 1}/{len(content)}"
                    self.answer(206, rest, Content_Range=span, **about)
                else:
                    self.answer(200, content, **about)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def commit(self, repo: str) -> str:
        """The newest commit of a repository: it changes with the files."""
        return hash_of_files(tuple(sorted(self.repositories[repo].items())))[:40]

    def environment(self, cache: Path) -> dict[str, str]:
        """The variables of a process that uses this hub."""
        own = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        own |= {"HF_ENDPOINT": self.address, "HF_HOME": str(cache / "hf")}
        own |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**os.environ, **own}

    def close(self) -> None:
        """End it."""
        self.server.shutdown()
        self.server.server_close()


@cache
def digest(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


@cache
def hash_of_files(files: tuple[tuple[str, bytes], ...]) -> str:
    """SHA-256 of names and contents."""
    return digest(repr(files).encode())


def main() -> None:
    """The program."""
    with one_line_errors():
        print(local_path(sys.argv[1], tokenizer_only="--tokenizer_only" in sys.argv))


if __name__ == "__main__":
    main()
