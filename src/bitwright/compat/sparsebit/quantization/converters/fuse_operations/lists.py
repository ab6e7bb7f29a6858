"""The schedules of the stage *fuse* in the order in which they run."""

from bitwright.graph import SCHEDULES

fuse_list = lists = [name for name in SCHEDULES.names() if SCHEDULES.get(name).stage == "fuse"]
