"""The list of defects that tests are tried on keeps up with the code."""

import subprocess
import sys
from pathlib import Path


def test_every_defect_still_applies():
    script = Path(__file__).parents[1] / "tools" / "plant_defects.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 30
