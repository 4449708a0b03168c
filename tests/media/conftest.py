"""No test of the media may leave a process or a thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert not [thread for thread in threading.enumerate() if thread.name == "vaepar-writer"]
