"""The download sizes for joining and for each round, and the form in which soups are sent.

The hub prints them at startup and announces them before anybody joins. Contributors compare them with their policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.task import bytes_to_join
from gym_fed.core.text import counted, readable_bytes
from gym_fed.delta.base import BaseSpec
from gym_server.privacy.merge import trained_tensors
from gym_server.rounds.recipes import LiveConfig
from gym_server.rounds.round_store import RoundStore

if TYPE_CHECKING:
    from gym_fed.delta.policy import CodecChoice


@dataclass(frozen=True)
class SoupForm:
    """The form in which the soups of a config are sent.

    Attributes:
        form: ``factors`` for LoRA factors, ``values`` for LoRA updates whose soup is not in factors, ``full`` for full
            fine-tuning.
        why: The reason, as text; for ``values``, what prevents a soup in factors and how to change it.
        one_a: True if all contributors of a round share one A, so that a soup has the rank of one update.
    """

    form: str
    why: str
    one_a: bool = False

    def to_dict(self) -> dict[str, str]:
        """Return the fields that contributors see before they join."""
        return {"form": self.form, "why": self.why}

    @classmethod
    def of(cls, config: ServerConfig) -> SoupForm:
        """Return the form that results from a config's rules and codec; see ``gym_fed.soup.adapters``."""
        from gym_fed.soup.adapters import writes_factors
        from gym_fed.soup.aggregator import WeightRule
        from gym_fed.soup.pipeline import Pipeline

        soup, recipe = config.soup, config.recipe
        if not recipe.sends_factors:
            return cls("full", f"codec {soup.codec.codec}")
        factors = writes_factors(soup.codec)
        if not factors or soup.codec.error_feedback:
            feedback = " with error_feedback" if factors else ""
            return cls(
                "values",
                f"soup.codec is {soup.codec.codec}{feedback}; leave soup.codec out to send LoRA factors",
            )
        if soup.server_optimizer != "none":
            return cls(
                "values",
                f"server_optimizer {soup.server_optimizer} changes every weight; set it to none to send LoRA factors",
            )
        if recipe.lora.freeze_a:
            return cls("factors", f"LoRA factors of rank {recipe.lora.r}", one_a=True)
        if not isinstance(Pipeline.of(soup).aggregator, WeightRule):
            return cls(
                "values",
                f"aggregator {soup.aggregator} is coordinate-wise, so its soup has no factors; set "
                "recipe.lora.freeze_a: true, or use a rule that weighs whole updates, such as byzantine_robust",
            )
        return cls("factors", f"LoRA factors, stacked: rank {recipe.lora.r} for each contributor")


class Downloads:
    """The download sizes that a hub announces; use one object per hub, since it caches them."""

    def __init__(self, live_config: LiveConfig, base: BaseSpec, round_store: RoundStore) -> None:
        self._live_config, self._base = live_config, base
        self._round_store = round_store
        self._form: tuple[ServerConfig, SoupForm] | None = None
        self._soups: tuple[int, int, int] = (0, 0, 0)
        self._estimates: dict[
            int, int
        ] = {}  # by number of contributors: cached, since status is read often and shapes never change

    @property
    def form(self) -> SoupForm:
        """Return the form in which this hub sends soups."""
        config = self._live_config.current
        if self._form is None or self._form[0] is not config:  # the coordinator may have changed the recipe
            self._form = (config, SoupForm.of(config))
            self._estimates.clear()
        return self._form[1]

    def announced(self, height: int, num_connected: int) -> tuple[int, int]:
        """Return the bytes to download for joining at a version, and approximately those of one more round.

        Args:
            height: Height of the newest version.
            num_connected: Number of connected contributors. Before the first soup, its size is estimated from the
                stacked factors of this many updates.
        """
        if self._soups[0] != height:
            soups = self._round_store.soups(height)
            self._soups = (height, bytes_to_join(soups), soups[-1].size_bytes if soups else 0)
        _, total, newest = self._soups
        if newest:
            return total, newest
        form = self.form
        contributors = max(self._live_config.current.rounds.quorum(0), num_connected)
        if contributors not in self._estimates:
            size = soup_bytes(self._live_config.current, self._base, contributors, form)
            self._estimates[contributors] = size
        return 0, self._estimates[contributors]

    def line(self) -> str:
        """Return the line about downloads that is printed when the hub starts."""
        form, quorum = self.form, self._live_config.current.rounds.quorum(0)
        size = soup_bytes(self._live_config.current, self._base, quorum, form)
        grows = form.form == "factors" and not form.one_a
        among = f" with {counted(quorum, 'contributor')}" if grows else ""
        if form.form == "values":
            return f"soups are sent as full matrices, {readable_bytes(size)} down per contributor and round: {form.why}"
        most = "about" if form.form == "full" and self._live_config.current.soup.codec.adds_up else "at most"
        return f"soups are sent as {form.why}: {most} {readable_bytes(size)} down per contributor and round{among}"


def soup_bytes(config: ServerConfig, base: BaseSpec, contributors: int, form: SoupForm | None = None) -> int:
    """Estimate the maximum size of a soup of this many updates in bytes, without the parts that depend on values."""
    from gym_fed.delta.budget import estimated_bytes, file_bytes

    form, codec = form or SoupForm.of(config), config.soup.codec
    if form.form == "factors":
        rank = config.recipe.lora.r * (1 if form.one_a else contributors)
        names = trained_tensors(config.recipe, base)
        return file_bytes([_factors(config, name, base, rank) for name in names], base, {})
    return estimated_bytes(trained_tensors(config.recipe, base), codec, base)


def _factors(config: ServerConfig, name: str, base: BaseSpec, rank: int) -> CodecChoice:
    from gym_quant import get_codec

    from gym_fed.delta.manifest import TensorRecord
    from gym_fed.delta.policy import CodecChoice
    from gym_fed.soup.adapters import largest_rank

    codec, shape = config.soup.codec, base.shapes[name]
    rows, cols = shape
    most = largest_rank((rows, cols))
    if codec.lora_rank is None and rank > most:
        dense = get_codec("dense")
        params = dense.normalise({"dtype": codec.dense_dtype}, shape)
        return CodecChoice(TensorRecord(name, shape, "dense", params), dense.payload_bytes(shape, params), "")
    wanted: dict[str, object] = {"rank": min(rank, codec.lora_rank or rank, rows, cols)}
    wanted["factors"] = "int8" if codec.factors == "auto" else codec.factors
    if codec.quantises_factors and codec.factor_group_size is not None:
        wanted["factor_group_size"] = codec.factor_group_size
    lora = get_codec("lora")
    params = lora.normalise(wanted, shape)
    return CodecChoice(TensorRecord(name, shape, "lora", params), lora.payload_bytes(shape, params), "")
