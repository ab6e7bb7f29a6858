"""Small nets in the style of well-known ones, with the constructs these are written with."""

from tests.zoo.case import ZOO, Case
from tests.zoo.constructs import *  # noqa: F403
from tests.zoo.detection import *  # noqa: F403
from tests.zoo.images import *  # noqa: F403
from tests.zoo.sequences import *  # noqa: F403
from tests.zoo.text import *  # noqa: F403
from tests.zoo.vision_transformers import *  # noqa: F403

__all__ = ["ZOO", "Case"]
