"""The list of defects that tests are tried on keeps up with the code."""

import runpy
from pathlib import Path


def test_every_defect_still_applies(capsys):
    tool = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "plant_defects.py"))
    assert tool["check"]() == 0, capsys.readouterr().out
    assert len(tool["read"](tool["TABLE"])) >= 300
