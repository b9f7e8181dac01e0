"""How the processes of a supervised learner find each other: through the run.

The first one opens a port and writes its address to the run; the others read it. So it works alike in a folder and at a
URL, on one machine and on several.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torch import distributed

from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import Pause
from rlhf_pipeline.run.processes.launch import GROUP, HOST
from rlhf_pipeline.run.signals import StopRequest

_Store: Any = distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented there


def meeting_of(run: RunFolder, stop: StopRequest) -> Any:
    """Return the `torch.distributed.Store` where the processes of this group meet; None under torchrun."""
    group = os.environ.get(GROUP)
    if group is None:
        return None
    file = run.group_file
    if os.environ["RANK"] == "0":
        host = os.environ.get(HOST, "127.0.0.1")
        store = _Store(host, 0, is_master=True, wait_for_workers=False)
        run.write(file, json.dumps({"group": group, "host": host, "port": store.port}).encode())
        return store
    pause = Pause(1.0)
    while not stop:
        try:
            meeting = json.loads(run.bring(file).read_bytes())
        except (FileNotFoundError, ValueError):
            meeting = {}
        if meeting.get("group") == group:  # not an earlier group, whose processes are gone
            return _Store(meeting["host"], meeting["port"], is_master=False)
        pause.sleep()
    raise KeyboardInterrupt
