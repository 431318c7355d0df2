"""Evaluations of several files: every response once, on one weight id, whoever is lost on the way; accuracies
per file."""

from helpers.made import trajectory
from laminar_hpc.controller.trajectories.evaluations import Evaluations
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.line.messages.rollouts import Generated, Lost, Scored
from laminar_hpc.store.store import Store


def files():
    return {
        name: [Prompt(f"{i}", [i], {"right": i % 2}) for i in range(count)]
        for name, count in (("a", 3), ("b", 4))
    }


def answer(evaluations, grant, accuracy, skip=()):
    """Reports every sample of a grant but those in `skip`, which are lost; gives the evaluation when that
    finished it."""
    for group in grant.groups:
        for sample in group.samples:
            if sample.trajectory_id in skip:
                evaluations.lost(Lost(sample.trajectory_id, sample.attempt, "engine", grant.evaluation))
                continue
            evaluations.generated(Generated(trajectory(group, sample), grant.evaluation))
            parts = {"accuracy": accuracy(group, sample)}
            done = evaluations.scored(
                Scored(sample.trajectory_id, sample.attempt, 0.0, parts, "", 1.0, grant.evaluation)
            )
    return done


def test_greedy_and_mean_at_k_per_file():
    """pass@1: one greedy response per problem; mean@k: k sampled ones at the training temperature; both over
    each file alone."""
    evaluations = Evaluations(files(), 3, 0.7, 48)
    evaluations.add("before", 0, shares=1)
    grant = evaluations.grant(0, 5, 2, 0, now=1.0)
    assert (grant.temperature, len(grant.groups), {len(g.samples) for g in grant.groups}) == (0.0, 7, {1})
    done = answer(evaluations, grant, lambda group, sample: group.row["right"])
    results = evaluations.results(done, now=3.0)
    assert [(r["file"], r["name"], r["accuracy"], r["problems"], r["samples"]) for r in results] == [
        ("a", "greedy", 1 / 3, 3, 1),
        ("b", "greedy", 0.5, 4, 1),
    ]
    same = ("weight_id", "step", "label", "seconds", "response_length_mean")
    assert {tuple(r[key] for key in same) for r in results} == {(5, 2, "before", 2.0, 3.0)}
    grant = evaluations.grant(0, 5, 2, 1, now=3.0)
    assert grant.temperature == 0.7 and {len(g.samples) for g in grant.groups} == {3}
    assert len({s.trajectory_id for g in grant.groups for s in g.samples}) == 21
    done = answer(evaluations, grant, lambda group, sample: float(sample.trajectory_id % 3 == 0))
    assert [(r["file"], r["accuracy"], r["samples"]) for r in evaluations.results(done, 4.0)] == [
        ("a", 1 / 3, 3),
        ("b", 1 / 3, 3),
    ]
    assert evaluations.queue == [] and evaluations.grant(0, 5, 2, 2, 4.0) is None


def test_lost_responses_are_asked_again_on_the_same_weights():
    """An evaluation never mixes weight ids, whoever is lost on the way."""
    evaluations = Evaluations(files(), 2, 1.0, 48)
    evaluations.add("step", 4, shares=2)
    del evaluations.queue[0]
    assert evaluations.grant(0, 8, 3, 0, 0.0) is None, (
        "weights of an earlier step are not evaluated for step 4"
    )
    first, second = evaluations.grant(0, 9, 4, 0, 0.0), evaluations.grant(1, 9, 4, 1, 0.0)
    assert [len(g.groups) for g in (first, second)] == [4, 3]
    assert answer(evaluations, first, lambda *_: 1.0, skip={2, 7}) is None
    assert answer(evaluations, second, lambda *_: 1.0) is None
    assert evaluations.grant(0, 10, 5, 2, 0.0) is None, "never two weight ids in one evaluation"
    again = evaluations.grant(1, 9, 4, 3, 0.0)
    assert [s.trajectory_id for g in again.groups for s in g.samples] == [2, 7]
    assert answer(evaluations, first, lambda *_: 0.0) is None, (
        "reports of an earlier attempt count for nothing"
    )
    done = answer(evaluations, again, lambda *_: 0.0)
    assert [r["accuracy"] for r in evaluations.results(done, 1.0)] == [5 / 6, 7 / 8]


def test_an_evaluation_whose_weights_are_gone_starts_again():
    """With no replica left on its weights, it begins anew on the newest."""
    evaluations = Evaluations(files(), 0, 1.0, 48)
    evaluations.add("step", 4, shares=1)
    assert len(evaluations.queue) == 1, "samples=0: greedy only"
    answer(evaluations, evaluations.grant(0, 9, 4, 0, 0.0), lambda *_: 1.0, skip={0})
    evaluations.reset_stranded({12})
    grant = evaluations.grant(0, 12, 6, 1, 0.0)
    assert len(grant.groups) == 7
    done = answer(evaluations, grant, lambda *_: 1.0)
    assert {(r["weight_id"], r["step"], r["accuracy"]) for r in evaluations.results(done, 1.0)} == {
        (12, 6, 1.0)
    }


def test_what_was_scored_counts_at_the_next_controller(tmp_path):
    """Only what had no score is asked again, on the same weights; on others all of it."""
    store = Store(tmp_path)

    def controller(number):
        evaluations = Evaluations(files(), 0, 1.0, 48, number * 1000, store)
        evaluations.add("after", 4, shares=2)
        return evaluations

    first = controller(0)
    share, key = first.grant(0, 9, 4, 0, 5.0), first.queue[0].key
    answer(first, share, lambda *_: 1.0, skip={2})
    second = controller(1)
    second.go_on(key, 9, 4, 5.0)
    grants = [second.grant(replica, 9, 4, replica, 8.0) for replica in (0, 1)]
    assert [[s.trajectory_id for g in grant.groups for s in g.samples] for grant in grants] == [
        [2],
        [4, 5, 6],
    ]
    assert answer(second, share, lambda *_: 0.0) is None, "an attempt of the controller before"
    assert answer(second, grants[0], lambda *_: 0.0) is None
    done = answer(second, grants[1], lambda *_: 0.0)
    results = second.results(done, 9.0)
    assert [(r["accuracy"], r["weight_id"], r["seconds"]) for r in results] == [
        (2 / 3, 9, 4.0),
        (0.25, 9, 4.0),
    ]
    assert {r["response_length_mean"] for r in results} == {3.0}
    third = controller(2)
    third.go_on(key, 9, 4, 5.0)
    assert third.queue[0].scored == 0, "those of a complete evaluation are forgotten"
    share = third.grant(0, 9, 4, 0, 5.0)
    answer(third, share, lambda *_: 1.0, skip={2})
    third.reset_stranded({12})
    assert len(third.grant(0, 12, 4, 0, 5.0).groups) == 4
    store.close()


def test_trainers_that_start_again_take_evaluations_of_lost_steps_back():
    """What is due to later steps goes, what has begun on later weights starts again on new ones, and what was
    asked before counts for nothing, also under the same name."""
    evaluations = Evaluations(files(), 0, 1.0, 48)
    for label, step in (("step", 2), ("step", 4), ("after", 6)):
        evaluations.add(label, step, shares=1)
    first = evaluations.grant(0, 9, 3, 0, 0.0)
    second = evaluations.grant(1, 10, 4, 1, 0.0)
    evaluations.restore(2, first_id=11)
    assert [e.min_step for e in evaluations.queue] == [2]
    assert evaluations.grant(0, 10, 4, 2, 0.0) is None, "weights of a step that is lost"
    evaluations.add("step", 4, shares=1)
    for old in (first, second):
        assert answer(evaluations, old, lambda *_: 1.0) is None
    again, later = evaluations.grant(0, 11, 2, 3, 0.0), evaluations.grant(1, 12, 4, 4, 0.0)
    assert later.evaluation == second.evaluation
    assert answer(evaluations, second, lambda *_: 1.0) is None
    done = answer(evaluations, again, lambda *_: 0.0)
    assert {(r["weight_id"], r["step"], r["accuracy"]) for r in evaluations.results(done, 1.0)} == {
        (11, 2, 0.0)
    }
