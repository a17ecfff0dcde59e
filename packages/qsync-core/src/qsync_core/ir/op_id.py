"""Names of operators: the module that makes a call, and the index of that call."""

from __future__ import annotations

import functools
import re

import attrs

from qsync_core.ir import checks

MAX_FQN = 1024
"""Longest name of an operator, in characters."""

_CALL = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)


@functools.total_ordering
@attrs.frozen(order=False, cache_hash=True)
class OpId:
    """``fqn#call``: the fully qualified name of a module (or functional call) and the index of its call.

    The second call of a shared module is ``#1``.  A functional call gets the FQN of the module that made it followed by the
    operator's name (``encoder.layer.0.attention.self.scaled_dot_product_attention#0``); one made by the root module is
    named by the operator alone.  Graph inputs are called ``$input.<name>#0``.
    """

    fqn: str = attrs.field(validator=attrs.validators.instance_of(str))
    call: int = attrs.field(default=0, validator=checks.non_negative_int)

    def __attrs_post_init__(self) -> None:
        if not self.fqn or "#" in self.fqn or not self.fqn.isprintable() or len(self.fqn) > MAX_FQN:
            shown = self.fqn[:80]
            raise ValueError(f"an operator's FQN is 1 to {MAX_FQN} printable characters without '#', got {shown!r}")

    @classmethod
    def parse(cls, text: str) -> OpId:
        """Read ``fqn#call``; a bare ``fqn`` means its first call.

        Raises:
            ValueError: when the text is not of that form.
        """
        fqn, separator, call = text.partition("#")
        if separator and not _CALL.fullmatch(call):
            raise ValueError(f"an operator is written 'fqn#call', for example 'layer1.0.conv1#0'; got {text[:80]!r}")
        return cls(fqn, int(call) if separator else 0)

    def __str__(self) -> str:
        return f"{self.fqn}#{self.call}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, OpId):
            return NotImplemented
        return (self.fqn, self.call) < (other.fqn, other.call)
