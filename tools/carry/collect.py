"""What belongs into a pack: the stages of a folder of runs, their files, and the data with their hashes."""

import platform
import re
import shlex
import subprocess
import uuid
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common.arguments import checked, parse_args
from common.errors import UserError, say
from common.files import files_in, is_file, is_folder, is_running, is_there, read_object
from common.settings import ROOT, FrozenModelArgs, StageArgs
from dataset.files import expand_paths
from dataset.mixing import split_weights
from dataset.token_cache import file_hash
from tools.carry.manifest import (
    DATA,
    FOR_READING,
    MANIFEST,
    SUFFIXES,
    DataFile,
    Manifest,
    Stage,
    read_manifest,
    script_of,
    settings_as_text,
    stage_args,
    stage_words,
)
from tools.compare.flags import as_text
from trainer.callbacks.train_state import total_updates
from trainer.checkpoint.earlier import run_files
from trainer.checkpoint.file import newest_checkpoint
from trainer.checkpoint.same_run import code_version
from trainer.weights.paths import (
    TOKENIZER_FILES,
    is_hugging_face,
    is_path,
    model_files,
    resume_path,
    run_name,
    start_path,
)

VERSIONS = ("torch", "transformers", "numpy")
BESIDE_THE_RUNS = ("generation_config.json", "plan.json", "job.log")


def collect(folder: Path, with_data: bool) -> tuple[Manifest, dict[str, Path]]:
    """The manifest of a folder of runs, without the sizes of its files, and the files by their names in the
    pack. The folder is of a plan, or of stages that were started by hand, or an unpacked pack. Raises
    UserError if it holds none, or something that a pack cannot hold."""
    if is_file(folder / MANIFEST):
        manifest = read_manifest((folder / MANIFEST).read_bytes())
        sources = {name: folder / name for name in manifest.files if is_file(folder / name)}
        manifest.files = {}
        sources |= {name: folder / name for name in manifest.data}
        stages = [stage_args(each, stage_words(each, manifest, folder)) for each in manifest.stages]
    else:
        manifest, sources, stages = new_manifest(folder)
        for each in manifest.stages:  # what `go` would refuse is refused now
            stage_args(each, stage_words(each, manifest, Path("/")))
    for args in stages:
        name = run_name(args.save_weight, args)
        if is_running(name, folder):
            raise UserError(f"{name} is being trained in {folder}; stop it first")
        state = progress(args)
        manifest.updates[name] = state["update"]
        sources |= files_of_run(args, folder)
        sources.pop(f"checkpoints/{name}_resume.pth", None)
        if state["update"]:
            sources[f"checkpoints/{name}_resume.pth"] = Path(state["loaded_from"])
    manifest.updates = {name: update for name, update in manifest.updates.items() if update}
    for name, file in manifest.data.items():
        file.packed = file.packed or with_data
        if not file.packed:
            del sources[name]
    manifest.code = code_version()
    manifest.versions = {name: version(name) for name in VERSIONS} | {"python": platform.python_version()}
    manifest.written = f"{datetime.now(UTC).isoformat(timespec='seconds')} on {platform.node()}"
    return manifest, sources


def progress(args: StageArgs) -> dict[str, Any]:
    """The newest intact state of a stage: `update` (0: it has not begun), `finished` and `loaded_from`."""
    saved = newest_checkpoint(resume_path(args.checkpoint_dir, args.save_weight, args))
    if saved is None:
        return {"update": 0, "finished": False, "loaded_from": None}
    try:
        update = int(saved["update"])
        finished = saved["finished"] or update >= total_updates(saved["fingerprint"])
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{saved['loaded_from']} is not the checkpoint of a stage") from error
    return {"update": update, "finished": bool(finished), "loaded_from": saved["loaded_from"]}


def files_of_run(args: StageArgs, folder: Path) -> dict[str, Path]:
    """The weights, records and settings of a run, by their names in the pack."""
    sources = {}
    for weight in (args.save_weight, f"{args.save_weight}_best"):
        name = run_name(weight, args)
        for path in run_files(folder, name):
            if re.match(rf"{re.escape(name)}_(resume|best_resume|update_\d)", path.name):
                continue  # of a run whose folders are one
            found = files_in(path) if is_folder(path) else [path]  # an adapter is a folder
            sources |= {str(file.relative_to(folder)): file for file in found if file.suffix in SUFFIXES}
    for path in files_in(folder, "tokenizer_*"):  # beside the weights that need it
        sources |= {f"{path.name}/{name}": path / name for name in TOKENIZER_FILES if is_file(path / name)}
    return sources


# --- a folder that was not packed before


class Collection:
    """The stages of a folder in the form of a manifest. Settings that name places get the names that these
    have in a pack."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.sources: dict[str, Path] = {}
        self.data: dict[str, DataFile] = {}
        self.known: dict[str, str] = {}  # value of a setting -> its name in the pack

    def add_stage(self, script: str, args: StageArgs) -> Stage:
        """A stage in the form of a manifest. Raises UserError if it cannot be carried."""
        if Path(args.save_dir).resolve() != self.folder.resolve():
            raise UserError(f"{args.save_weight} writes to {args.save_dir}, not to {self.folder}")
        settings = settings_as_text(args)
        for name in DATA:
            value = getattr(args, name, None)
            if value in ("auto", "none"):  # of --sample_prompts
                if not args.is_default(name):
                    settings[name] = value
            elif value:
                settings[name] = self.add_data(value)
        if not args.is_default("tokenizer_path"):
            settings["tokenizer_path"] = self.add_tokenizer(Path(args.tokenizer_path))
        settings["from_weight"] = self.add_weights(args.from_weight, args)
        if isinstance(args, FrozenModelArgs):
            for flag, paths in args.frozen_model_paths().items():
                if any(path.parent.resolve() != self.folder.resolve() for path in paths):
                    raise UserError(f"--{flag} is not in {self.folder}; only what lies there is carried")
                self.sources |= {path.name: path for path in paths}
        return Stage(script=script, settings=settings)

    def add_data(self, value: str) -> str:
        """Add the files of a data path. Returns the path of their copies."""
        sources, weights = split_weights(value)
        if weights:
            return ",".join(f"{self.add_source(s)}:{w:g}" for s, w in zip(sources, weights, strict=True))
        if value not in self.known:
            self.known[value] = ",".join(self.add_files(expand_paths(value)))
        return self.known[value]

    def add_source(self, source: str) -> str:
        """Add a source that has a weight. Returns its copy: a file, or the folder of several."""
        if source not in self.known:
            names = self.add_files(expand_paths(source))
            self.known[source] = names[0] if len(names) == 1 else names[0].rpartition("/")[0]
        return self.known[source]

    def add_files(self, paths: list[str]) -> list[str]:
        """Add files of data, in an order that their names keep. Returns their names in the pack."""
        names = []
        number = len({name.split("/")[1] for name in self.data})
        for i, path in enumerate(paths):
            plain = re.sub(r"[^\w.+-]", "_", Path(path).name).lstrip(".")
            if len(paths) > 1:
                plain = f"{i:04}_{plain}"
            names.append(f"data/{number}/{plain}")
            size, digest = Path(path).stat().st_size, file_hash(path)
            is_own = self.folder.resolve() in Path(path).resolve().parents  # a plan's exercises
            self.data[names[-1]] = DataFile(bytes=size, sha256=digest, packed=is_own)
            self.sources[names[-1]] = Path(path)
        return names

    def add_tokenizer(self, folder: Path) -> str:
        """Add a tokenizer. Returns the name of its folder."""
        key = f"tokenizer {folder}"
        if key not in self.known:
            self.known[key] = f"tokenizer/{sum(each.startswith('tokenizer ') for each in self.known)}"
            for name in filter(lambda name: is_file(folder / name), TOKENIZER_FILES):
                self.sources[f"{self.known[key]}/{name}"] = folder / name
        return self.known[key]

    def add_weights(self, value: str, args: StageArgs) -> str:
        """Add start weights, unless they are gone, as they may be after the first update. Returns their name:
        as it is for weights in the folder."""
        path = start_path(args.save_dir, value, args)
        is_inside = path.parent.resolve() == self.folder.resolve()
        if value == "none" or (not is_there(path) and not is_path(value)):
            return value
        name = path.name
        if not is_inside:
            number = self.known.setdefault(
                f"start {path}", str(sum(each.startswith("start ") for each in self.known))
            )
            name = f"start/{number}/{name}"
        if is_hugging_face(path):
            files = [*model_files(path), *(path / each for each in TOKENIZER_FILES)]
            self.sources |= {f"{name}/{file.name}": file for file in files if is_file(file)}
        elif is_file(path):
            self.sources[name] = path
        return name if is_path(value) else value


def new_manifest(folder: Path) -> tuple[Manifest, dict[str, Path], list[StageArgs]]:
    """The manifest, the files and the stages of a folder that was not packed before. Raises UserError."""
    if not is_folder(folder):
        raise UserError(f"{folder}: no such folder; give the --save_dir of the runs, such as out/plan")
    found = stages_of_script(folder / "run.sh") if is_file(folder / "run.sh") else stages_of_runs(folder)
    if not found:
        raise UserError(f"{folder} holds neither the run.sh of a plan nor runs")
    collection = Collection(folder)
    stages = [collection.add_stage(script, args) for script, args in found]
    sources = collection.sources | {name: folder / name for name in BESIDE_THE_RUNS if is_file(folder / name)}
    if is_file(folder / "run.sh"):
        sources[FOR_READING[0]] = folder / "run.sh"
    manifest = Manifest(
        id=uuid.uuid4().hex, name=folder.resolve().name, written="", code="", versions={}, stages=stages,
        updates={}, files={}, data=collection.data,
    )  # fmt: skip
    return manifest, sources, [args for _, args in found]


def stages_of_script(path: Path) -> list[tuple[str, StageArgs]]:
    """The stages of a plan's run.sh, with edits of their flags. Raises UserError for a line that is no plain
    command."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape").replace("\\\n", " ")
    stages = []
    for line in text.splitlines():
        if not line.startswith('"$python" trainer/'):
            continue
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "$@"]
        if any("$" in word for word in words):
            raise UserError(f"{path}: the command {line[:80]!a} ... has variables; write their values")
        script = Path(words[0]).stem
        stages.append((script, parse_args(script_of(script).Args, None, words[1:])))
    return stages


def stages_of_runs(folder: Path) -> list[tuple[str, StageArgs]]:
    """The stages that were started by hand with this --save_dir, by their settings files, in the order of
    their first starts. Raises UserError for a run of the engine."""
    found = [stage_of_run(path) for path in files_in(folder, "*_run.json")]
    return [(script, args) for _, script, args in sorted(found, key=lambda each: each[0])]


def stage_of_run(path: Path) -> tuple[str, str, StageArgs]:
    """The time of the first start of a run, its stage and its settings, by its settings file. Raises
    UserError."""
    about = read_object(path)
    try:
        script, began = Path(about["stage"]).stem, about["starts"][0]["time"]
        args_class = script_of(script).Args
        given = about["settings"]
        fields = given.keys() & args_class.model_fields.keys()
        given |= {name: as_text(args_class, name, given[name]) for name in fields}
        values = [(name, f"{path}: {name}", text) for name, text in given.items()]
        return began, script, args_class().model_copy(update=checked(args_class, values))
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the settings file of a run") from error


def code_edits(target: Path) -> None:
    """Write the edits of the code since its commit, for reading; nothing if there are none or no git."""
    try:
        done = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return
    if done.stdout:
        target.write_bytes(done.stdout)
        say(f"the code has edits since its commit; they are in the pack as {FOR_READING[1]}, for reading")


def describe_runs(folder: Path) -> list[str]:
    """A line for each run in a folder: on which machines it was trained, and what its results equal."""
    lines = []
    for path in files_in(folder, "*_run.json"):
        about = read_object(path)
        starts = [each for each in about.get("starts") or () if isinstance(each, dict)]
        machines = dict.fromkeys(str(each.get("machine", "unknown")) for each in starts)
        named = ", ".join(machines)
        lines.append(
            f"{path.name.removesuffix('_run.json')}: {len(starts)} starts on {named}; "
            f"{about.get('results', 'not noted')}"
        )
    return lines
