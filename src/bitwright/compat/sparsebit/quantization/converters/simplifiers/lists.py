"""The schedules of the stage *simplify* in the order in which they run."""

from bitwright.graph import SCHEDULES

fuse_list = lists = [name for name in SCHEDULES.names() if SCHEDULES.get(name).stage == "simplify"]
