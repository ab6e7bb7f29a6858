"""What a file holds, digested part by part, so that a part that differs can be named."""

import hashlib
from collections.abc import Mapping


class Contents:
    """Collects digests by name; a name that comes again gets a number."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    def add(self, name: str, content: bytes | str) -> None:
        """Digest one part."""
        free, count = name, 1
        while free in self.digests:
            count += 1
            free = f"{name} (number {count})"
        self.digests[free] = hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What differs between two files' contents, in words that fit "the file"."""
    found = [f"{name} differs" for name in ours if name in theirs and ours[name] != theirs[name]]
    found += [f"{name} is missing" for name in ours if name not in theirs]
    return found + [f"{name} is not in what export writes" for name in theirs if name not in ours]
