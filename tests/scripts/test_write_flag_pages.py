"""The flag pages: those that are checked in are what the script writes; what it cannot write is one line."""

from dataclasses import dataclass, replace

import pytest
import yaml

from common.errors import UserError
from common.settings import ROOT, StageArgs, setting, settings_of
from scripts import write_flag_pages
from scripts.write_flag_pages import PAGES, default, english, rewritten, tables, value
from tests.stage_process import run


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_are_what_the_script_writes(path):
    """If this fails, a setting has changed: run `python scripts/write_flag_pages.py`."""
    assert (ROOT / path).read_text(encoding="utf-8") == rewritten(path)


def copy_pages(folder):
    for path in ("docs/flags.md", "docs/zh/flags.md", "docs/zh/flags.yaml"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")


def test_the_command_writes_the_tables_and_leaves_the_text(tmp_path, monkeypatch, capsys):
    copy_pages(tmp_path)
    page = tmp_path / "docs/flags.md"
    right = page.read_text(encoding="utf-8")
    page.write_text(
        right.replace("| seconds |", "| hours |").replace("# Flags", "# All flags"), encoding="utf-8"
    )
    monkeypatch.setattr(write_flag_pages, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["write_flag_pages.py"])
    write_flag_pages.main()
    assert (
        page.read_text(encoding="utf-8").startswith("# All flags\n") and "| hours |" not in page.read_text()
    )
    assert capsys.readouterr().out == "wrote docs/flags.md\nwrote docs/zh/flags.md\n"
    page.write_text(right.replace("<!-- end of engine -->\n", ""), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"docs/flags.md lacks the line .* or <!-- end of engine -->; put it back"
    ):
        write_flag_pages.main()


def test_a_mistake_on_its_command_line_is_one_line():
    done = run(str(ROOT / "scripts/write_flag_pages.py"), ["--check"], status=2)
    assert done.err == "error: unrecognized arguments: --check; see --help\n"


def test_a_setting_without_a_chinese_text_and_a_text_without_a_setting_are_named():
    words = yaml.safe_load((ROOT / "docs/zh/flags.yaml").read_text(encoding="utf-8"))
    words["meanings"]["no_flag"] = words["meanings"].pop("grad_clip")
    with pytest.raises(UserError, match=r"missing, or of no setting: grad_clip, no_flag$"):
        tables(words)


def test_every_kind_of_value_and_default():
    @dataclass(kw_only=True)
    class Args(StageArgs):
        z_loss: float = setting(0.0001, "weight of the z-loss", ge=0, lt=1)

    found = settings_of(Args)
    shown = {name: (value(found[name]), default(found[name])) for name in found}
    assert shown["z_loss"] == ("FLOAT ≥ 0, < 1", "0.0001") and shown["learning_rate"] == (
        "FLOAT > 0, `auto`",
        "0.0005",
    )
    assert shown["use_moe"] == ("`0`, `1`", "0") and shown["parallel"] == ("`ddp`, `fsdp`, `hsdp`", "ddp")
    assert shown["save_dir"] == ("TEXT", "out/") and shown["eval_data_path"] == ("TEXT", "-")
    assert default(replace(found["z_loss"], default=1e-5)) == "1e-5" and default(None) == ""


def test_a_flag_of_one_stage_alone_stands_in_its_column_only(monkeypatch):
    own = write_flag_pages.Setting("z_loss", float, 1e-4, "of the z-loss; see --epochs", "", {}, "this stage")
    pretrain, sft, *others = write_flag_pages.STAGES
    monkeypatch.setattr(write_flag_pages, "STAGES", [pretrain, {**sft, "z_loss": own}, *others])
    monkeypatch.setattr(write_flag_pages, "FLAGS", {**write_flag_pages.FLAGS, "z_loss": own})
    text = tables(english())["stages"]
    cells = ["FLOAT", "", "0.0001", *[""] * len(others), "", "of the z-loss; see `--epochs`"]
    assert text.split("### This stage\n")[1].endswith(f"| `--z_loss` | {' | '.join(cells)} |\n")
