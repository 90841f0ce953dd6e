"""The description for package indexes: the README, whose links into the repository lead nowhere from there."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text()

setup(long_description=re.sub(r"\[([^]]+)\]\((?!https?://)[^)]*\)", r"\1", README))
