"""The routes by which the web page trains (--train 1). The page sends names, numbers and choices, but never a
path, a flag or a command."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal
from urllib.parse import quote

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError, WriteError, printable, reason
from common.files import json_lines, read_object, write_json
from common.settings import ROOT
from scripts.demo.corpus import write_files
from scripts.demo.world import make_corpus
from scripts.planning.files import FACTS
from scripts.planning.rules import DEPTHS, WIDTH
from scripts.planning.signature import is_signed
from scripts.planning.stages import START_SECONDS
from scripts.runs.report import sentences
from scripts.runs.run import WRONG_TYPES, Run
from scripts.runs.words import LANGUAGES, WORDS
from scripts.serve.api import is_own_page, read_body
from scripts.serve.folders import files_in, scan
from scripts.serve.jobs import (
    ABOUT,
    LIVING,
    READY,
    REPORT,
    SCRIPT,
    Jobs,
    error_of,
    forget_plan,
    forget_report,
    log_tail,
    open_own,
)
from scripts.serve.models import Models
from scripts.serve.page import RunFiles, json_response
from scripts.serve.protocol import ApiError
from scripts.serve.taught import KIND, NEW, about_teaching
from scripts.serve.teaching import Teachings
from scripts.serve.uploads import MAX_BYTES, Uploads, no_room, room
from trainer.weights.paths import CONFIG_FILE, METRICS_SUFFIX, WEIGHTS_FILE, shape_in_name

PLAN = ROOT / "scripts" / "plan.py"
NAME = re.compile(r"(?!earlier_\d+$)\w[\w -]{0,39}")  # earlier_N: runs that were set aside
EXAMPLE = ("valley.jsonl", "valley questions.jsonl")  # texts and conversations about an invented world
HF_FILES = {CONFIG_FILE, WEIGHTS_FILE}  # a folder with these is a model
HOURS = {"ge": 0.02, "le": 168}
MOST_FILES = 200
MAX_BODY = 1 << 16  # bytes of a request; files may be larger
MOST_CORRECTIONS, MOST_MESSAGES = 1000, 1000  # of a request that teaches
MAX_TEACHING = 4 << 20  # bytes of such a request
ROOM = 1 << 30  # bytes of disk that a plan's files must leave free
STOPPED_AFTER = re.compile(r"stopped: .*?after update (\d+) of ")  # what a stage prints after it has saved
NOT_SHOWN = {"Content-Security-Policy": "sandbox", "X-Content-Type-Options": "nosniff"}


class Body(BaseModel):
    """A request. Fields that it does not declare are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class NewJob(Body):
    """What is to be planned: names of files, the model that is trained on (None: a new one), hours, layers,
    the language of run.sh, and whether bad records are skipped."""

    name: str
    files: list[str] = Field(min_length=1, max_length=MOST_FILES)
    start: str | None = None
    hours: float = Field(**HOURS)
    depth: int | None = None
    lang: Literal["en", "zh"] = "en"
    skip_bad: bool = False


class PlannedStage(BaseModel):
    """A stage in the facts of a plan."""

    model_config = ConfigDict(allow_inf_nan=False)

    run: str
    is_pretraining: bool
    passes: float
    updates: int = Field(ge=1)
    seconds: float


class PlanFacts(BaseModel):
    """The facts of a plan that the page shows (`facts` in scripts/planning/files.py)."""

    model_config = ConfigDict(allow_inf_nan=False)

    parameters: float
    width: int
    depth: int
    stages: list[PlannedStage] = Field(min_length=1)
    seconds: float
    limit: str
    memory: float
    memory_free: float
    disk: float
    disk_free: float
    unwise: list[dict[str, str | float]]


class Convert(Body):
    """The speaker of an exported chat who is the assistant."""

    assistant: str


class Rename(Body):
    """The new name of a model."""

    to: str


class Corrected(Body):
    """A correction, as a record of SFT: the conversation up to the answer as it should have been."""

    messages: list[dict[str, Any]] = Field(min_length=2, max_length=MOST_MESSAGES)
    tools: list[dict[str, Any]] = []

    def record(self) -> dict[str, Any]:
        """The fields that were sent."""
        return self.model_dump(exclude_unset=True)


class NewTeaching(Body):
    """A request to teach a model. removed: corrections that the user has taken back. without_old_data: teach
    it even if its old data are not found."""

    model: str
    corrections: list[Corrected] = Field(min_length=1, max_length=MOST_CORRECTIONS)
    removed: list[Corrected] = Field([], max_length=MOST_CORRECTIONS)
    without_old_data: bool = False


class Start(Body):
    """A request to start or continue a job. without_old_data: as in NewTeaching."""

    without_old_data: bool = False


class Stop(Body):
    """How to end a training: `now` ends it without saving."""

    now: bool = False


def own_page_only(request: Request) -> None:
    """Refuse requests of other pages, also of those in --allow_origin, and requests that an HTML form can
    send. Raises ApiError."""
    if not is_own_page(request):
        raise ApiError("Only the server's own page may train.", 403)
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if request.method == "POST" and kind != "application/json":
        raise ApiError("The body must be application/json.", code="field")


async def read(request: Request, kind: type[Any], most: int = MAX_BODY) -> Any:
    """The body of a request, of at most this many bytes. Raises ApiError."""
    try:
        return kind.model_validate_json(await read_body(request, most))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(f"{place}: {first['msg']}", 400, place or None, "field") from error


def training_routes(jobs: Jobs, uploads: Uploads, models: Models, make_room: Callable[[], Any]) -> APIRouter:
    """All routes below /api/train. models: those that can be taught. make_room: drops unused models from
    memory; it is called before memory is measured."""
    routes = APIRouter(prefix="/api/train", dependencies=[Depends(own_page_only)])
    progress, teachings = Progress(), Teachings(jobs, models, make_room)
    one_at_a_time = CapacityLimiter(1)  # only one request at a time reads runs

    def described(folder: Path, name: str) -> dict[str, Any]:
        if about_teaching(folder):
            return teachings.describe(folder, name, progress)
        return describe(folder, name, jobs, progress)

    def overview() -> Response:
        folders = jobs.folders()
        listed = [describe_or_say(folder, name, described) for name, folder in folders.items()]
        listed = [job for job in listed if not (job.get("kind") == KIND and job["state"] == NEW)]
        listed.sort(key=lambda job: (job["state"] not in LIVING, job["age"]))
        sizes = [[depth, WIDTH * depth] for depth in DEPTHS]
        weights = [name for name in other_weights(jobs.save_dir) if name not in folders]
        answer = {"sizes": sizes, "disk_free": disk_usage(jobs.save_dir).free, "weights": weights}
        answer |= {"most": MAX_BYTES, "most_files": MOST_FILES, "room": room(uploads.folder)}
        return json_response(answer | {"files": uploads.listing(), "jobs": listed})

    def plan(asked: NewJob) -> None:
        check_fields(asked)
        argv = [sys.executable, str(PLAN), "--save_dir", str(jobs.save_dir / asked.name)]
        argv += ["--hours", f"{asked.hours:g}", "--lang", asked.lang]
        argv += ["--cache_dir", str(jobs.save_dir / ".cache")]  # on the disk whose free space is checked
        paths: dict[str, list[str]] = {"text": [], "chat": []}
        for name in dict.fromkeys(asked.files):
            path, kind = uploads.readable(name)
            paths[kind].append(str(path))
        for flag, of_kind in (("--pretrain_data", paths["text"]), ("--sft_data", paths["chat"])):
            if len(of_kind) > 1 and "," in str(uploads.folder):
                text = f"{uploads.folder} has a comma in its name, which separates files; take one file"
                raise ApiError(text, 409, "files", "comma")
            if of_kind:
                argv += [flag, ",".join(of_kind)]
        if asked.start is not None:
            argv += ["--from_weight", str(weights_of(jobs, asked.start, reads_text=bool(paths["text"])))]
        elif asked.depth is not None:
            argv += ["--depth", str(asked.depth)]
        if asked.skip_bad:
            argv += ["--on_bad_data", "skip"]

        def prepare(folder: Path) -> None:
            check_unused(folder, jobs)
            forget_plan(folder, asked.model_dump())

        make_room()
        jobs.start(asked.name, argv, prepare, plans=True)

    def start(name: str, without_old_data: bool) -> None:
        folder = jobs.folder(name)
        if about_teaching(folder):
            teachings.go_on(folder, without_old_data)
            return
        if jobs.state(folder).name in LIVING:
            raise ApiError(f"{name} is being trained.", 409, None, "busy", name=name)
        check_script(folder, name)
        written = sum(file.size for files in scan(folder).values() for file in files.values())
        need = max(0, plan_of(folder).get("disk", 0) - written) + ROOM
        if need > (free := disk_usage(folder).free):
            raise no_room(need, free)
        make_room()
        jobs.start(folder.name, ["bash", str(folder / SCRIPT)], forget_report)

    def rename_model(name: str, new_name: str) -> None:
        jobs.move(name, new_name, (READY,))
        folder = jobs.save_dir / new_name
        if not os.path.lexists(folder / ABOUT):  # a terminal planned it
            write_json(folder / ABOUT, {})  # without run.sh this file tells that it is a training
        # it names the old folder, in which it would train once more
        (folder / SCRIPT).unlink(missing_ok=True)

    async def done(function: Callable[..., Any], *args: Any) -> Response:
        await run_sync(function, *args)
        return JSONResponse({"ok": True}, 202)

    @routes.get("")
    async def train() -> Response:
        return await run_sync(overview, limiter=one_at_a_time)

    @routes.put("/files/{name}")
    async def put(name: str, request: Request) -> Response:
        request.scope["is_upload"] = True  # connections.py waits for it as long as data arrive
        length = request.headers.get("content-length")
        pieces = request.stream()
        return json_response(await uploads.receive(name, int(length) if length else None, pieces))

    @routes.delete("/files/{name}")
    def delete(name: str) -> Response:
        path = uploads.path(name)
        if jobs.uses(path):
            raise ApiError(f"An unfinished training needs {name}.", 409, code="used")
        path.unlink(missing_ok=True)
        return JSONResponse({"ok": True})

    @routes.post("/files/{name}/conversations")
    async def convert(name: str, request: Request) -> Response:
        asked = await read(request, Convert)
        made = await run_sync(uploads.convert, name, asked.assistant, limiter=uploads.one_at_a_time)
        return json_response({"name": made})

    @routes.post("/jobs")
    async def new(request: Request) -> Response:
        return await done(plan, await read(request, NewJob))

    @routes.post("/jobs/{name}/start")
    async def go_on(name: str, request: Request) -> Response:
        asked = await read(request, Start)
        return await done(start, name, asked.without_old_data)

    @routes.post("/teachings")
    async def teach(request: Request) -> Response:
        asked = await read(request, NewTeaching, MAX_TEACHING)
        new, removed = ([each.record() for each in part] for part in (asked.corrections, asked.removed))
        name = await run_sync(teachings.teach, asked.model, new, removed, asked.without_old_data)
        return JSONResponse({"name": name}, 202)

    @routes.post("/jobs/{name}/keep")
    async def keep(name: str) -> Response:
        return await done(teachings.keep, name)

    @routes.post("/jobs/{name}/discard")
    async def discard(name: str) -> Response:
        return await done(teachings.discard, name)

    @routes.post("/jobs/{name}/stop")
    async def stop(name: str, request: Request) -> Response:
        asked = await read(request, Stop)
        return await done(jobs.stop, jobs.folder(name).name, asked.now)

    @routes.post("/jobs/{name}/rename")
    async def rename(name: str, request: Request) -> Response:
        asked = await read(request, Rename)
        check_name(asked.to)
        return await done(rename_model, name, asked.to)

    @routes.post("/jobs/{name}/delete")
    async def put_away(name: str) -> Response:
        return await done(jobs.move, name, None)

    @routes.post("/example")
    async def example() -> Response:
        return await done(write_example, uploads)

    @routes.get("/jobs/{name}/log")
    def log(name: str) -> Response:
        return Response(log_tail(jobs.folder(name)), media_type="text/plain", headers=NOT_SHOWN)

    @routes.get("/jobs/{name}/report")
    def report(name: str) -> Response:
        folder = jobs.folder(name)
        try:
            with open_own(folder, REPORT) as file:
                content = file.read()
        except FileNotFoundError as error:
            raise ApiError(f"{name} has no report yet.", 404, code="no_report") from error
        except OSError as error:
            text = f"The report of {name} is not shown: {reason(error)}; links are not followed."
            raise ApiError(text, 403, code="no_report") from error
        disposition = f"attachment; filename*=utf-8''{quote(name)}.html"
        return Response(
            content, media_type="text/html", headers=NOT_SHOWN | {"Content-Disposition": disposition}
        )

    return routes


def check_name(name: str) -> None:
    """Raise ApiError if a training cannot have this name."""
    if not NAME.fullmatch(name):
        raise ApiError(f"{name[:60]!r} is no name; use letters, digits, blanks.", 400, "name", "field")


def check_fields(asked: NewJob) -> None:
    """Raise ApiError if a field is out of range."""
    check_name(asked.name)
    if asked.depth is not None and asked.depth not in DEPTHS:
        raise ApiError(f"depth must be one of {DEPTHS}.", 400, "depth", "field")


def weights_of(jobs: Jobs, name: str, reads_text: bool) -> Path:
    """The weights with which a model continues: those of its pretraining if it reads more text, because SFT
    follows, otherwise its last ones. The name may also be one of `other_weights`. Raises ApiError if the
    model is not completed."""
    if name not in jobs.folders() and (path := other_weights(jobs.save_dir).get(name)):
        return path
    folder = jobs.folder(name)
    stages = plan_of(folder).get("stages", [])
    pretrained = [stage["run"] for stage in stages if stage["is_pretraining"]]
    runs = (pretrained if reads_text else []) or [stage["run"] for stage in stages]
    if jobs.state(folder).name != READY or not runs or f"{runs[-1]}.pth" not in files_in(folder, links=False):
        raise ApiError(f"{name} has no weights to continue from.", 409, "start", "no_weights", name=name)
    return folder / f"{runs[-1]}.pth"


def other_weights(save_dir: Path) -> dict[str, Path]:
    """Name -> path of the weights in this folder that none of its trainings wrote: files NAME_256.pth, and
    folders of Hugging Face's form. Links are left out because they lead elsewhere."""
    found = {}
    for folder, files in scan(save_dir).items():
        own = {name for name, file in files.items() if not file.is_link}
        if folder == save_dir:
            weights = [folder / name for name in own if shape_in_name(folder / name)]
            found |= {printable(path.stem): path for path in sorted(weights)}
        elif own >= HF_FILES and not own & {SCRIPT, ABOUT} and not folder.is_symlink():
            found[printable(folder.name)] = folder
    return found


def write_example(uploads: Uploads) -> None:
    """Put the built-in texts and conversations among the uploads. Raises ApiError."""
    made = make_corpus(seed=0)
    files = {EXAMPLE[0]: made["pretrain.jsonl"], EXAMPLE[1]: made["sft.jsonl"]}
    for name, records in files.items():
        path = uploads.folder / name
        if os.path.lexists(path) and (path.is_symlink() or path.read_bytes() != json_lines(records)):
            raise ApiError(f"{name} exists already, with other content.", 409, code="own_file", file=name)
    try:
        write_files(uploads.folder, files)
    except (UserError, WriteError) as error:
        raise ApiError(f"The example cannot be written: {error}", 507, code="not_started") from error


def check_unused(folder: Path, jobs: Jobs) -> None:
    """Raise ApiError if the folder of a new training exists, unless nothing was trained in it. No training
    runs during this check."""
    if not folder.is_symlink() and not folder.exists():
        return
    is_trained = (folder / REPORT).exists() or list(folder.glob(f"*{METRICS_SUFFIX}"))
    if is_trained or about_teaching(folder) or folder not in jobs.folders().values():
        raise ApiError(f"{folder.name} exists already.", 409, "name", "exists")


def check_script(folder: Path, name: str) -> None:
    """Raise ApiError unless the folder has a run.sh that scripts/plan.py wrote: a click runs this file, and
    nobody reads it before."""
    try:
        with open_own(folder, SCRIPT) as file:
            script = file.read()
    except OSError as error:
        raise ApiError(f"{name} has no plan.", 409, code="no_plan") from error
    if not is_signed(script, folder, plan_of(folder).get("signature")):
        text = f"{SCRIPT} of {name} is not as plan.py wrote it; read it, then start it in a terminal"
        raise ApiError(text, 409, code="not_planned_here", name=name)


# --- what the page shows of a training


def describe_or_say(
    folder: Path, name: str, describe: Callable[[Path, str], dict[str, Any]]
) -> dict[str, Any]:
    """The result of `describe` for a job. If the files of a training contain what no training writes, the
    result says that they cannot be read."""
    try:
        about = describe(folder, name)
        json.dumps(about, default=str, allow_nan=False)  # browsers do not accept NaN
        return about
    except (OSError, *WRONG_TYPES) as error:
        about = {"name": name, "state": "failed", "asked": {}, "plan": None, "is_own": False}
        text = f"its files cannot be read ({reason(error)})"
        return about | {"stage": 0, "stages": 0, "age": 0.0, "error": {"code": "other", "text": text}}


def plan_of(folder: Path) -> dict[str, Any]:
    """The facts of a training's plan; empty if there are none, or if they are not those of a plan."""
    facts = read_object(folder / FACTS, links=False)
    try:
        PlanFacts.model_validate(facts)
    except ValidationError:
        return {}
    return facts


def asked_of(folder: Path) -> dict[str, Any]:
    """What the user asked for; empty if job.json does not hold a valid request."""
    try:
        return NewJob.model_validate(read_object(folder / ABOUT, links=False)).model_dump()
    except ValidationError:
        return {}


def describe(folder: Path, name: str, jobs: Jobs, progress: "Progress") -> dict[str, Any]:
    """A training: its state, plan and progress."""
    state, lines, is_own = jobs.state(folder)
    facts, files = plan_of(folder), files_in(folder, links=False)
    about: dict[str, Any] = {"name": name, "state": state, "asked": asked_of(folder)}
    about |= {"plan": facts or None, "error": error_of(lines) if state == "failed" else None}
    about["is_own"] = is_own
    stages = facts.get("stages", [])
    names = [f"{stage['run']}{METRICS_SUFFIX}" for stage in stages]
    begun = [folder / name for name in names if name in files and files[name].size]
    newest = max([file.mtime for file in files.values()], default=0.0)
    about["age"] = round(max(0.0, time.time() - newest), 1)
    if state == READY:
        last = files.get(f"{stages[-1]['run']}.pth") if stages else None
        about |= {"made": files[REPORT].mtime, "bytes": last.size if last else None}
    if not begun:
        return about | {"stage": 0, "stages": len(stages)}
    about |= progress.of(begun[-1], len(begun) - 1, stages, state == READY)
    if state == "stopped" and (stop := next(filter(None, map(STOPPED_AFTER.match, reversed(lines))), None)):
        about["saved_at"] = int(stop[1])  # the last record may be of an earlier update
    return about


class Progress:
    """How far trainings are, and their results. Reading one costs only what was added to its records since
    the last time: there may be many records, and the page asks every two seconds."""

    def __init__(self) -> None:
        self.runs = RunFiles()
        # path of the records -> their size and time when they were read, and the result
        self.found: dict[Path, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def of(self, path: Path, number: int, stages: list[dict[str, Any]], is_ready: bool) -> dict[str, Any]:
        """The progress of a training. path: records of its present stage. number: of this stage. is_ready:
        whether the training is completed; then the result has the verdict. Calls must not overlap."""
        stat = path.stat()
        seen, age = (stat.st_size, stat.st_mtime, is_ready), max(0.0, time.time() - stat.st_mtime)
        if self.found.get(path, (None,))[0] != seen:
            run = self.runs.read(path)
            found = progress_of(run, number, stages)
            if is_ready:
                found["verdict"] = {lang: WORDS[lang]["; "].join(sentences(run, lang)) for lang in LANGUAGES}
            self.found[path] = seen, found
        found = dict(self.found[path][1])
        found["seconds_left"] = max(0.0, found.pop("stage_left") - age) + found.pop("later_left")
        return found | {"record_age": age}


def progress_of(run: Run, number: int, stages: list[dict[str, Any]]) -> dict[str, Any]:
    """How far a training is. run: its present stage. number: of this stage. In the result, stage_left is the
    seconds that this stage still needed at its last record, and later_left those of the stages after it.
    right: how many held-out questions it answers right, and how many it was asked."""
    stage, figures = stages[number], run.figures
    facts = run.about.get("facts") or {}
    left = run.values["seconds_left"][-1] if "seconds_left" in run.values else stage["seconds"]
    came = figures.get("seconds", 0.0) + left
    ratio = came / stage["seconds"] if run.count > 1 and stage["seconds"] else 1.0
    measured = [value for value in run.values.get("eval_loss", ()) if value == value]
    initial = run.values.get("initial_eval_loss", measured[:1])
    answers = zip(run.values.get("eval_answers", ()), run.values.get("asked", ()), strict=False)
    right = [[round(share * asked), round(asked)] for share, asked in answers if share == share]
    sample = next(iter(run.samples.items()), None)
    return {
        "stage": number,
        "stages": len(stages),
        "update": figures.get("update", 0),
        "updates": facts.get("total_updates", stage["updates"]),
        "stage_left": left,
        "later_left": sum(ratio * each["seconds"] + START_SECONDS for each in stages[number + 1 :]),
        "eval_loss": [initial[0], measured[-1]] if measured else None,
        "right": right[-1] if right else None,
        "sample": [sample[0], sample[1][-1][1]] if sample else None,
    }
