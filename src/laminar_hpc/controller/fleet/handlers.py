"""Who takes which message of a member, by the sender's role. A message that its role does not send is refused
(controller/fleet/membership.py); Hello and StopRequest come from anybody."""

from collections.abc import Callable
from typing import Any

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.parts import Protocols
from laminar_hpc.line.messages.chain import LinkDown, RelayHas, StoreOpened
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.homes import Ask
from laminar_hpc.line.messages.membership import Failure, Goodbye, Ping
from laminar_hpc.line.messages.moves import Answer, Imported, MoveFailed, MoveReady, Reserved
from laminar_hpc.line.messages.parking import HandedOn, Parked, TakeUp
from laminar_hpc.line.messages.places import GateOpened
from laminar_hpc.line.messages.publication import LaneSenders, NewWeightId, Published
from laminar_hpc.line.messages.rollouts import (
    EngineHung,
    Generated,
    Holds,
    Increment,
    Leaving,
    Lost,
    NotLoaded,
    RequestWork,
    Scored,
    Unfinished,
    WeightsOpened,
)
from laminar_hpc.line.messages.training import (
    Checkpointed,
    Restored,
    StepDone,
    TakeBatch,
    TrainerDone,
    TrainersMeet,
)

Handler = Callable[[Member, Any], None]  # the message's type is that of its line in the table
Handlers = dict[type[Message], Handler]


def handlers(c: Protocols) -> dict[str, Handlers]:
    """Returns the handlers by role; called once, when all parts are made."""
    everyone: Handlers = {Ping: c.on_ping, Goodbye: c.membership.on_goodbye, Failure: c.membership.on_failure}
    trainer: Handlers = {
        TrainersMeet: c.trainer_generation.on_trainers_meet,
        Restored: c.training.on_restored,
        TakeBatch: c.training.on_take_batch,
        StepDone: c.training.on_step_done,
        Checkpointed: c.training.on_checkpointed,
        TrainerDone: c.training.on_trainer_done,
        LaneSenders: c.weights.on_lane_senders,
        NewWeightId: c.weights.on_new_weight_id,
        Published: c.weights.on_published,
    }
    links: Handlers = {StoreOpened: c.weights.on_store_opened, LinkDown: c.weights.on_link_down}
    relay: Handlers = {
        RelayHas: c.weights.on_relay_has,
        GateOpened: c.weights.places.on_gate_opened,
        Reserved: c.migration.on_reserved,
        MoveFailed: c.migration.on_move_failed,
        Parked: c.parking.on_parked,
        HandedOn: c.parking.on_handed_on,
    }
    rollout: Handlers = {
        WeightsOpened: c.dispatcher.on_weights_opened,
        RequestWork: c.dispatcher.on_request_work,
        Holds: c.reattachment.on_holds,
        NotLoaded: c.failover.on_not_loaded,
        Generated: c.reports.on_generated,
        Increment: c.reports.on_increment,
        Scored: c.reports.on_scored,
        Lost: c.reports.on_lost,
        Leaving: c.draining.on_leaving,
        Unfinished: c.draining.on_unfinished,
        EngineHung: c.failover.on_engine_hung,
        Reserved: c.migration.on_reserved,
        MoveReady: c.migration.on_move_ready,
        Imported: c.migration.on_imported,
        MoveFailed: c.migration.on_move_failed,
        Answer: c.answers.on_answer,
        Ask: c.homes.on_ask,
        TakeUp: c.parking.on_take_up,
    }
    return {
        "trainer": everyone | trainer | links,
        "relay": everyone | relay | links,
        "rollout": everyone | rollout,
    }
