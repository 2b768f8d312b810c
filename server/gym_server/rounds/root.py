"""The coordinator's own (root) update, trained on the hub on trusted data, with which some rules compare updates.

Cao et al. 2021, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping": training on a small clean root
dataset, in the same way as contributors, gives the direction and norm against which updates are judged.
"""

from __future__ import annotations

import logging
import shutil

from gym_fed.config.delta import CodecPolicy
from gym_fed.config.hub.round_training import round_training
from gym_fed.config.hub.server import ServerConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.encode import encode_delta, lora_delta
from gym_server.rounds.hub_model import HubModel, coordinator_rows
from gym_server.rounds.round_store import Round
from gym_server.state import HubState

log = logging.getLogger("gym_server")

_EXACT = CodecPolicy(codec="dense", dense_dtype="float32", error_feedback=False)


def root_update(state: HubState, config: ServerConfig, model: HubModel, current: Round) -> str | None:
    """Train with the round's recipe on the root data, and restore the model afterwards.

    Returns:
        sha256 of the stored update, or None if the config names no root data.

    Raises:
        GymError: Errors from the data and the training; ``ROUND_ABORTED`` for a failure of the training libraries.
    """
    root = config.root
    if root is None:
        return None
    from gym_fed.training.trainer import Trainer
    from gym_fed.training.tuning.lora import lora_factors

    server_round = current.server_round
    rows = coordinator_rows(root.data, root.format, root.max_examples, state.folder, "train")
    recipe = current.spec.recipe if current.spec is not None else config.recipe
    folder = state.folder / "staging" / f"root-{server_round}"
    shutil.rmtree(folder, ignore_errors=True)
    out = folder.with_suffix(".gymdelta")
    try:
        with model.borrowed() as before:
            trainer = Trainer(
                round_training(recipe, server_round, folder, device=model.model.device.type),
                model=model.model,
                tokenizer=model.tokenizer,
            )
            result = trainer.train(dataset=rows, resume=False)
            if recipe.sends_factors:
                lora_delta(lora_factors(result.model), out, model.spec)
            else:
                encode_delta(result.model, before, _EXACT, out, model.spec)
    except GymError:
        raise
    except Exception as error:
        # torch, TRL and PEFT raise errors of any type; if one did not end the round, every restart would repeat it
        log.exception("round %d: training on the root data failed", server_round)
        raise GymError(
            ErrorCode.ROUND_ABORTED,
            f"training on the root data failed: {type(error).__name__}: {error}",
            "the log has the traceback; a smaller batch or max_length in the recipe needs less memory",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sha256 = state.store.put_file(out)
    out.unlink()
    return sha256
