"""A Hub-compatible server on loopback: what the tests push to, with the real client, over plain HTTP.

It covers what the client of huggingface_hub 2.4 asks for on the way of a push, a pull and a load. Contents lie under a
temporary folder by their sha256, so a commit is one rename and a broken upload leaves no trace in the repository.
`faults` switches on what goes wrong in the field; `requests` records what was asked.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote

import uvicorn
import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

OWNER, READER, OTHER = "owner-token", "reader-token", "other-token"
LFS_SUFFIXES = (".safetensors", ".png", ".parquet")
MAX_REGULAR_BYTES = 10 * 1024 * 1024


@dataclass(frozen=True)
class User:
    name: str
    role: str = "write"
    """What the token may do: read, or write."""


@dataclass
class Faults:
    """What goes wrong, until it is switched off."""

    lfs_put_from: int | None = None
    """Every upload of an LFS object from the n-th on (1-based) is answered with 500."""
    commit_status: int | None = None
    """Commits are refused with this status; nothing is written."""
    lose_commit_answer: bool = False
    """Commits are written, but answered with 500."""
    stall_seconds: float = 0.0
    """Every answer waits that long."""


@dataclass
class Entry:
    sha256: str
    size: int
    oid: str
    """git's blob hash for a regular file, the sha256 for an LFS object: the ETag, and what the client compares."""
    lfs: bool


@dataclass
class Commit:
    parent: str | None
    title: str
    files: dict[str, Entry]


@dataclass
class Repo:
    id: str
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def add_commit(self, title: str, files: dict[str, Entry], branch: str = "main") -> str:
        parent = self.branches.get(branch)
        tree = json.dumps({path: entry.oid for path, entry in sorted(files.items())})
        sha = hashlib.sha1(f"{parent}{title}{tree}".encode()).hexdigest()
        self.commits[sha] = Commit(parent, title, files)
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha


class RefusedError(Exception):
    def __init__(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}


class HubServer:
    """Start with `with HubServer(folder, {"token": User("alice")}) as hub`; the address is `hub.url`."""

    def __init__(self, root: Path, users: dict[str, User]) -> None:
        self.root, self.users = root, users
        self.faults = Faults()
        self.requests: list[tuple[str, str]] = []
        self.num_lfs_puts = 0
        (root / "objects").mkdir(parents=True)
        (root / "repos").mkdir()

    def __enter__(self) -> "HubServer":
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, interface="asgi3", host="127.0.0.1", port=0, log_level="error")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From here on connections are refused."""
        self._server.should_exit = True
        self._thread.join(timeout=20)

    # What tests look at

    def head(self, repo_id: str) -> str:
        return self.load_repo(repo_id).branches["main"]

    def content(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        repo = self.load_repo(repo_id)
        return self.object_path(repo.commits[repo.resolve(revision)].files[path].sha256).read_bytes()

    def paths(self, repo_id: str, revision: str = "main") -> set[str]:
        repo = self.load_repo(repo_id)
        return set(repo.commits[repo.resolve(revision)].files)

    def exists(self, repo_id: str) -> bool:
        return self.repo_path(repo_id).exists()

    def num_requests(self, method: str, pattern: str) -> int:
        return sum(m == method and re.search(pattern, path) is not None for m, path in self.requests)

    def write(self, repo_id: str, files: dict[str, bytes], title: str = "by hand") -> str:
        """The new head: files written as an owner would do in the browser. A file given as b"" is deleted."""
        repo = self.load_repo(repo_id)
        tree = dict(repo.commits[repo.branches["main"]].files)
        for path, content in files.items():
            tree.pop(path, None)
            if content:
                tree[path] = self.store(content, lfs=path.endswith(LFS_SUFFIXES))
        sha = repo.add_commit(title, tree)
        self.save_repo(repo)
        return sha

    def create(self, repo_id: str, private: bool = False, prefix: str = "") -> Repo:
        repo = Repo(prefix + repo_id, private)
        repo.add_commit("initial commit", {".gitattributes": self.store(b"*.safetensors filter=lfs\n", lfs=False)})
        self.save_repo(repo)
        return repo

    # Storage

    def object_path(self, sha256: str) -> Path:
        return self.root / "objects" / sha256

    def repo_path(self, repo_id: str) -> Path:
        return self.root / "repos" / (repo_id.replace("/", "--") + ".json")

    def store(self, content: bytes, *, lfs: bool) -> Entry:
        sha256 = hashlib.sha256(content).hexdigest()
        self.object_path(sha256).write_bytes(content)
        git_hash = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return Entry(sha256, len(content), sha256 if lfs else git_hash, lfs)

    def load_repo(self, repo_id: str) -> Repo:
        raw = json.loads(self.repo_path(repo_id).read_text())
        commits = {
            sha: Commit(c["parent"], c["title"], {path: Entry(**entry) for path, entry in c["files"].items()})
            for sha, c in raw["commits"].items()
        }
        return Repo(raw["id"], raw["private"], raw["branches"], commits)

    def save_repo(self, repo: Repo) -> None:
        aside = self.repo_path(repo.id).with_suffix(".aside")
        aside.write_text(json.dumps(asdict(repo)))
        os.replace(aside, self.repo_path(repo.id))

    # HTTP

    async def _app(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        # Revisions and paths arrive as %2F-quoted segments: only the raw path can be split.
        path = scope["raw_path"].decode()
        self.requests.append((request.method, path))
        if self.faults.stall_seconds:
            await asyncio.sleep(self.faults.stall_seconds)
        try:
            response = await self._route(request, path)
        except RefusedError as refusal:
            body = {"error": refusal.message}
            response = JSONResponse(body, status_code=refusal.status, headers=refusal.headers)
        await response(scope, receive, send)

    async def _route(self, request: Request, path: str) -> Response:
        for method, pattern, handler in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and request.method in method.split("|"):
                arguments = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                return await handler(self, request, **arguments)
        raise RefusedError(404, None, f"no such page: {request.method} {path}")

    def user(self, request: Request) -> User | None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in self.users:
            raise RefusedError(401, None, "Invalid credentials in Authorization header")
        return self.users[token]

    def readable(self, request: Request, repo_id: str) -> Repo:
        """The repository; a private one looks missing to everybody but its owner, as on the Hub."""
        user = self.user(request)
        repo = self.load_repo(repo_id) if self.exists(repo_id) else None
        if repo is None or (repo.private and (user is None or user.name != repo.id.split("/")[0])):
            raise RefusedError(401 if user is None else 404, "RepoNotFound", "Repository not found")
        return repo

    def writable(self, request: Request, repo_id: str) -> Repo:
        repo = self.readable(request, repo_id)
        user = self.user(request)
        if user is None:
            raise RefusedError(401, None, "Invalid username or password.")
        if user.role == "read" or user.name != repo.id.split("/")[0]:
            raise RefusedError(403, None, "you must use a write token of the owner to write to this repository")
        return repo


async def validate_yaml(hub: HubServer, request: Request) -> Response:
    errors = card_errors((await request.json())["content"])
    if "text/plain" in request.headers.get("accept", "") and errors:
        return PlainTextResponse("\n".join(errors), status_code=400)
    body = {"errors": [{"message": error} for error in errors], "warnings": []}
    return JSONResponse(body, status_code=400 if errors else 200)


def card_errors(content: str) -> list[str]:
    """What the Hub finds wrong in the front matter, for the keys this project writes."""
    match = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
    try:
        metadata = yaml.safe_load(match.group(1)) if match else {}
    except yaml.YAMLError as error:
        return [f"bad YAML: {error}"]
    errors = []
    if "license" in metadata and not re.fullmatch(r"[a-z0-9.-]+", str(metadata["license"])):
        errors.append('"license" must be one of the known identifiers')
    if "base_model" in metadata and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(metadata["base_model"])):
        errors.append('"base_model" must be a model id')
    for model in metadata.get("model-index") or []:
        for result in model.get("results", [{}]):
            for key, needed in (("task", ("type",)), ("dataset", ("type", "name"))):
                errors += [f'"model-index.{key}.{n}" is required' for n in needed if n not in result.get(key, {})]
            if not all({"type", "value"} <= set(metric) for metric in result.get("metrics", [{}])):
                errors.append('"model-index.metrics" need type and value')
            if not re.fullmatch(r"([\w-]+/)?[\w.-]+", str(result.get("dataset", {}).get("type"))):
                errors.append('"model-index.dataset.type" must look like a dataset id')
    return errors


async def whoami(hub: HubServer, request: Request) -> Response:
    user = hub.user(request)
    if user is None:
        raise RefusedError(401, None, "Invalid username or password.")
    token = {"displayName": "test", "role": user.role}
    return JSONResponse({"type": "user", "name": user.name, "orgs": [], "auth": {"accessToken": token}})


async def create_repo(hub: HubServer, request: Request) -> Response:
    user, body = hub.user(request), await request.json()
    owner = body.get("organization") or (user.name if user else None)
    if user is None or user.role == "read" or owner != user.name:
        raise RefusedError(403 if user else 401, None, f"You don't have the rights to create a model under {owner}")
    repo_id = f"{owner}/{body['name']}"
    if hub.exists(repo_id):
        return JSONResponse({"error": "exists", "url": f"{hub.url}/{repo_id}"}, status_code=409)
    hub.create(repo_id, private=body.get("visibility") == "private")
    return JSONResponse({"url": f"{hub.url}/{repo_id}"})


async def repo_info(hub: HubServer, request: Request, repo_id: str, revision: str) -> Response:
    repo = hub.readable(request, repo_id)
    sha = repo.resolve(revision or "main")
    siblings = [{"rfilename": path} for path in sorted(repo.commits[sha].files)]
    return JSONResponse({"id": repo.id, "private": repo.private, "sha": sha, "siblings": siblings, "tags": []})


async def refs(hub: HubServer, request: Request, repo_id: str) -> Response:
    repo = hub.readable(request, repo_id)
    branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in repo.branches.items()]
    return JSONResponse({"branches": branches, "converts": [], "tags": []})


async def auth_check(hub: HubServer, request: Request, repo_id: str, write: str) -> Response:
    (hub.writable if write else hub.readable)(request, repo_id)
    return JSONResponse({})


def tree_item(path: str, entry: Entry) -> dict:
    item = {"type": "file", "path": path, "size": entry.size, "oid": entry.oid}
    if entry.lfs:
        item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": 130}
    return item


async def tree(hub: HubServer, request: Request, repo_id: str, revision: str, path: str) -> Response:
    """The files below `path`. Always recursive: the client asks for nothing else on its way."""
    repo = hub.readable(request, repo_id)
    files = repo.commits[repo.resolve(revision)].files
    return JSONResponse([tree_item(p, e) for p, e in sorted(files.items()) if p.startswith(path)])


async def paths_info(hub: HubServer, request: Request, repo_id: str, revision: str) -> Response:
    repo = hub.readable(request, repo_id)
    files = repo.commits[repo.resolve(revision)].files
    wanted = re.findall(r"paths=([^&]*)", (await request.body()).decode())
    paths = [unquote(path.replace("+", " ")) for path in wanted]
    return JSONResponse([tree_item(path, files[path]) for path in paths if path in files])


async def preupload(hub: HubServer, request: Request, repo_id: str, revision: str) -> Response:
    repo = hub.writable(request, repo_id)
    known = repo.commits[repo.resolve(revision)].files
    answers = []
    for item in (await request.json())["files"]:
        lfs = item["path"].endswith(LFS_SUFFIXES) or item["size"] > MAX_REGULAR_BYTES
        entry = known.get(item["path"])
        answer = {"path": item["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        # Without the oid of what is there the client commits unchanged files again.
        answers.append({**answer, "oid": entry.oid if entry else None})
    return JSONResponse({"files": answers})


async def lfs_batch(hub: HubServer, request: Request, repo_id: str) -> Response:
    hub.writable(request, repo_id)
    objects = []
    for item in (await request.json())["objects"]:
        answer = {"oid": item["oid"], "size": item["size"]}
        if not hub.object_path(item["oid"]).exists():
            upload = {"href": f"{hub.url}/lfs/{item['oid']}"}
            answer["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/{repo_id}.git/info/lfs/verify"}}
        objects.append(answer)
    return JSONResponse({"transfer": "basic", "objects": objects})


async def lfs_put(hub: HubServer, request: Request, oid: str) -> Response:
    content = await request.body()
    hub.num_lfs_puts += 1
    if hub.faults.lfs_put_from is not None and hub.num_lfs_puts >= hub.faults.lfs_put_from:
        raise RefusedError(500, None, "Internal Server Error")
    if hashlib.sha256(content).hexdigest() != oid:
        raise RefusedError(400, None, "the content does not have the announced hash")
    hub.store(content, lfs=True)
    return Response()


async def lfs_verify(hub: HubServer, request: Request, repo_id: str) -> Response:
    hub.writable(request, repo_id)
    announced = await request.json()
    stored = hub.object_path(announced["oid"])
    if not stored.exists() or stored.stat().st_size != announced["size"]:
        raise RefusedError(404, None, "object not found")
    return JSONResponse({})


async def commit(hub: HubServer, request: Request, repo_id: str, revision: str) -> Response:
    """One new commit with all operations of the request, or none."""
    repo = hub.writable(request, repo_id)
    lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
    header = lines[0]["value"]
    if hub.faults.commit_status is not None:
        raise RefusedError(hub.faults.commit_status, None, "the commit was refused")
    if header.get("parentCommit", repo.branches[revision]) != repo.branches[revision]:
        raise RefusedError(412, None, "A commit has happened since. Please refresh and try again.")
    files = dict(repo.commits[repo.branches[revision]].files)
    for line in lines[1:]:
        apply_operation(hub, files, line["key"], line["value"])
    sha = repo.add_commit(header["summary"], files, revision)
    hub.save_repo(repo)
    if hub.faults.lose_commit_answer:
        raise RefusedError(500, None, "Internal Server Error")
    return JSONResponse({"commitUrl": f"{hub.url}/{repo_id}/commit/{sha}", "commitOid": sha})


def apply_operation(hub: HubServer, files: dict[str, Entry], key: str, value: dict) -> None:
    path = value["path"]
    if key == "file":
        files[path] = hub.store(base64.b64decode(value["content"]), lfs=False)
    elif key == "lfsFile":
        if not hub.object_path(value["oid"]).exists():
            raise RefusedError(400, None, f"LFS object {value['oid']} was not uploaded")
        files[path] = Entry(value["oid"], value["size"], value["oid"], lfs=True)
    elif key == "deletedFile":
        if files.pop(path, None) is None:
            raise RefusedError(404, "EntryNotFound", f"A file with this name doesn't exist: {path}")
    else:
        raise RefusedError(400, None, f"unknown operation {key}")


async def resolve_file(hub: HubServer, request: Request, repo_id: str, revision: str, path: str) -> Response:
    repo = hub.readable(request, repo_id)
    sha = repo.resolve(revision)
    entry = repo.commits[sha].files.get(path)
    if entry is None:
        # The commit on a 404 lets the client remember that the file does not exist.
        raise RefusedError(404, "EntryNotFound", f"no {path} in {sha}", {"X-Repo-Commit": sha})
    headers = {"X-Repo-Commit": sha, "ETag": f'"{entry.oid}"', "Accept-Ranges": "bytes"}
    if entry.lfs:
        headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
    if request.method == "HEAD":
        return Response(headers={**headers, "Content-Length": str(entry.size)})
    content, status = hub.object_path(entry.sha256).read_bytes(), 200
    if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
        start, stop = int(wanted[1]), int(wanted[2] or entry.size - 1) + 1
        headers["Content-Range"] = f"bytes {start}-{min(stop, entry.size) - 1}/{entry.size}"
        content, status = content[start:stop], 206
    return Response(content, status_code=status, headers=headers, media_type="application/octet-stream")


# Datasets are repositories of the same kind; their ids carry the prefix in the storage and in the addresses.
_ID = r"(?P<repo_id>(?:datasets/)?[\w.-]+/[\w.-]+)"
_API = r"/api/(?:models/)?" + _ID
ROUTES: list[tuple[str, str, Callable]] = [
    ("POST", r"/api/validate-yaml", validate_yaml),
    ("GET", r"/api/whoami-v2", whoami),
    ("POST", r"/api/repos/create", create_repo),
    ("GET", _API + r"(?:/revision/(?P<revision>[^/]+))?", repo_info),
    ("GET", _API + r"/refs", refs),
    ("GET", _API + r"/auth-check(?P<write>/write)?", auth_check),
    ("GET", _API + r"/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", tree),
    ("POST", _API + r"/paths-info/(?P<revision>[^/]+)", paths_info),
    ("POST", _API + r"/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", _API + r"/commit/(?P<revision>[^/]+)", commit),
    ("POST", "/" + _ID + r"\.git/info/lfs/objects/batch", lfs_batch),
    ("POST", "/" + _ID + r"\.git/info/lfs/verify", lfs_verify),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", lfs_put),
    ("HEAD|GET", "/" + _ID + r"/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve_file),
]
