"""The Merkle tree of a ledger's entries (RFC 6962, section 2.1): roots and inclusion proofs.

A leaf is ``sha256(0x00 || hash)`` for an entry's 32-byte hash, and a node is ``sha256(0x01 || left || right)``. The
left subtree of a node with *n* leaves has as many leaves as the largest power of two below *n*. Each tree thus consists
of complete subtrees, which never change as the ledger grows, and both classes store only those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from gym_fed.trust.ledger.entries import corrupt, is_hash

_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").hexdigest()
"""The root of a tree without leaves (RFC 6962, 2.1)."""


def leaf_hash(entry_hash: str) -> bytes:
    """Return the leaf hash of an entry's hash."""
    return hashlib.sha256(b"\x00" + bytes.fromhex(entry_hash)).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the node hash of two subtrees."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """The complete subtrees of a growing tree, largest first: O(log n) state from which the next root is computed."""

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        self.size = size
        self._peaks = list(peaks)

    def append(self, entry_hash: str) -> None:
        """Add a leaf."""
        node, size = leaf_hash(entry_hash), self.size
        while size & 1:
            node = node_hash(self._peaks.pop(), node)
            size >>= 1
        self._peaks.append(node)
        self.size += 1

    def root(self) -> str:
        """Return the root of the tree, in hex."""
        if not self._peaks:
            return EMPTY_ROOT
        node = self._peaks[-1]
        for peak in reversed(self._peaks[:-1]):
            node = node_hash(peak, node)
        return node.hex()

    def to_text(self) -> str:
        """Return the subtree hashes in hex, separated by spaces."""
        return " ".join(peak.hex() for peak in self._peaks)

    @classmethod
    def from_text(cls, size: int, text: str) -> Frontier:
        """Create a frontier from the text that ``to_text`` returns.

        Raises:
            GymError: ``STATE_CORRUPT`` if the text does not match a tree of this size.
        """
        peaks = text.split(" ") if text else []
        if len(peaks) != size.bit_count() or not all(is_hash(peak) for peak in peaks):
            raise corrupt(f"the subtrees stored for size {size} do not match a tree of that size")
        return cls(size, [bytes.fromhex(peak) for peak in peaks])


class Tree:
    """All complete subtrees of a growing tree (64 bytes per leaf), for proofs at any earlier size."""

    def __init__(self, entry_hashes: Iterable[str] = ()) -> None:
        self._levels: list[bytearray] = [bytearray()]
        for entry_hash in entry_hashes:
            self.append(entry_hash)

    @property
    def size(self) -> int:
        return len(self._levels[0]) // _BYTES

    def append(self, entry_hash: str) -> None:
        """Add a leaf and every subtree that it completes."""
        node, index, level = leaf_hash(entry_hash), self.size, 0
        self._levels[0] += node
        while index & 1:
            node = node_hash(self._complete(level, index - 1), node)
            index, level = index >> 1, level + 1
            if level == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level] += node

    def root(self, size: int) -> str:
        """Return the root of the tree of the first ``size`` leaves, in hex."""
        return self._range(0, size).hex() if size else EMPTY_ROOT

    def inclusion(self, index: int, size: int) -> list[str]:
        """Return the audit path of leaf ``index`` in the tree of ``size`` leaves (RFC 6962, 2.1.1), leaf first."""
        path, start, end = list[str](), 0, size
        while end - start > 1:
            middle = start + _split(end - start)
            if index < middle:
                path.append(self._range(middle, end).hex())
                end = middle
            else:
                path.append(self._range(start, middle).hex())
                start = middle
        return path[::-1]

    def _range(self, start: int, end: int) -> bytes:
        """Hash a subtree that is complete or at the tree's right edge."""
        size = end - start
        if size & (size - 1) == 0 and start % size == 0:
            level = size.bit_length() - 1
            return self._complete(level, start >> level)
        middle = start + _split(size)
        return node_hash(self._range(start, middle), self._range(middle, end))

    def _complete(self, level: int, index: int) -> bytes:
        return bytes(self._levels[level][index * _BYTES : (index + 1) * _BYTES])


def verify_inclusion(entry_hash: str, index: int, size: int, path: Sequence[str], root: str) -> bool:
    """Return True if the entry is leaf ``index`` of a tree with ``size`` leaves and this root (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size or not is_hash(entry_hash) or not all(is_hash(node) for node in path):
        return False
    steps, is_at_the_top = _climb(entry_hash, index, size, path)
    reached = steps[-1][2] if steps else leaf_hash(entry_hash).hex()
    return is_at_the_top and reached == root


def inclusion_steps(
    entry_hash: str, index: int, size: int, path: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return the steps from a leaf to the root: sibling, its side (``left`` or ``right``) and parent node."""
    return _climb(entry_hash, index, size, path)[0]


def _climb(
    entry_hash: str, index: int, size: int, path: Sequence[str]
) -> tuple[list[tuple[str, str, str]], bool]:
    """Follow a path to the root. Also return True if its length matches the height of the tree."""
    node, first, last = leaf_hash(entry_hash), index, size - 1
    steps = list[tuple[str, str, str]]()
    for sibling in path:
        if last == 0:
            return steps, False
        side = "left" if first & 1 or first == last else "right"
        if side == "left":
            node = node_hash(bytes.fromhex(sibling), node)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            node = node_hash(node, bytes.fromhex(sibling))
        first, last = first >> 1, last >> 1
        steps.append((side, sibling, node.hex()))
    return steps, last == 0


def _split(size: int) -> int:
    """Return the largest power of two below ``size``."""
    return 1 << (size - 1).bit_length() - 1
