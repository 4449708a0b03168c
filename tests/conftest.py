"""Every test computes with one thread: results do not depend on the machine, and rank threads do not fight."""

from __future__ import annotations

import os
import signal

# A shell gives its background jobs a SIGINT that is ignored, and Python leaves it so; tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub's client is imported: no test reaches the network

import torch

torch.set_num_threads(1)
