"""The schedules of the stage *fuse* in the order in which they run; append the name of a module to add one."""

from bitwright.compat.sparsebit.quantization.converters.lists import ScheduleList

fuse_list = lists = ScheduleList("fuse")
