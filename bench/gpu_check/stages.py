"""The stages of bench/gpu_check, in the order in which they run: each a program, its time limit, and the
figures that its verdict hangs on.

The most telling ones come first: the limits of those up to `tests` add up to less than the 25 minutes of one
call, so that they are reached even if each of them hangs.

Goals are those of the design on one GPU of 80 GB; the CPU's programs try the same way with tiny shapes, and
nothing is judged there.
"""

from dataclasses import dataclass

KERNELS = ("sglang",)
TRAINING = ("megatron.core",)


@dataclass(frozen=True)
class Goal:
    """A figure's limit, and what to do beyond it. A figure that the stage does not give is not judged."""

    figure: str
    cure: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def __str__(self) -> str:
        parts = ((">=", self.at_least), ("<=", self.at_most))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in parts if limit is not None)


@dataclass(frozen=True)
class Stage:
    """`gpu`, `cpu`: the words behind `python`, in which {out} is the folder of this check. `needs`: modules
    without which it is left out. `figures`: whether it takes --json. `cure`: where to look when it fails."""

    name: str
    seconds: float
    gpu: str
    cpu: str
    cure: str
    goals: tuple[Goal, ...] = ()
    needs: tuple[str, ...] = ()
    figures: bool = True


AUDIT = Goal("audit_culprits", "what the audit objects to is in the stage's log; please report it", at_most=0)
MISMATCH = Goal(
    "mismatch_over_limit",
    "engine and trainer do not compute the same model: docs/algorithms.md, engine and trainer",
    at_most=1.0,
)
PEAK = Goal(
    "peak_over_estimate",
    "the estimate lets runs start that do not fit: lower trainer.tokens_per_microbatch, and report it",
    at_most=1.0,
)
LIVE = "see the run's own log below {out}/runs; `laminar doctor` names what the machine lacks"

STAGES = (
    Stage(
        "doctor",
        60,
        "-m laminar_hpc.launch.cli doctor",
        "-m laminar_hpc.launch.cli doctor",
        "do what the lines with FAIL say",
        figures=False,
    ),
    Stage(
        "kernels",
        100,
        "bench/kernels.py --repeats 10",
        "bench/kernels.py --device cpu --repeats 2",
        "Triton does not run here: its wheel and the driver must fit; weights then go through plain torch",
        (
            Goal("pack_over_copy", "other work on the GPU, or on the host that launches?", 0.85),
            Goal("delta_over_copy", "encoding is slower than the memory: other work on the GPU?", 0.85),
        ),
    ),
    Stage(
        "kv",
        60,
        "bench/kv_device.py --repeats 10",
        "bench/kv_device.py --device cpu --tokens 64 --repeats 2",
        "the extension has no GPU part: make setup where nvcc is; KV then moves through plain torch",
        (
            Goal("gather_over_copy", "the extension is built for another GPU: rm -r build, make setup", 0.7),
            Goal("scatter_over_copy", "the extension is built for another GPU: rm -r build, make setup", 0.7),
            Goal("stage_out_over_copy", "pinned memory is short, or the link to the host is shared", 0.8),
            Goal("stage_in_over_copy", "pinned memory is short, or the link to the host is shared", 0.8),
            Goal("stage_over_sglang", "if the two above are met, SGLang's own copy is fast here", 3.0),
        ),
    ),
    Stage(
        "trainer-0.5b",
        90,
        "bench/gpu_check/trainer_alone.py --shape 0.5b --runs-dir {out}/runs/trainer",
        "bench/gpu_check/trainer_alone.py --shape tiny --tokens 256 --steps 2 --runs-dir {out}/runs/trainer",
        "the log's last line; out of memory: another process holds the GPU (nvidia-smi)",
        (
            PEAK,
            Goal("mfu", "make apex; FlashAttention 3; fewer activations recomputed: docs/gpu_check.md", 0.3),
        ),
        needs=TRAINING,
    ),
    Stage(
        "engine-0.5b",
        200,
        "bench/gpu_check/engine_alone.py --shape 0.5b --runs-dir {out}/runs/engine-0.5b",
        "bench/gpu_check/engine_alone.py --shape tiny --concurrent 1 4 --repeats 1"
        " --runs-dir {out}/runs/engine",
        "logs/engine*.log below {out}/runs: SGLang's own words; its kernels need nvcc at the first start",
        needs=KERNELS,
    ),
    Stage(
        "live",
        300,
        "bench/gpu_check/live.py --part pair --steps 10 --runs-dir {out}/runs/pair",
        "bench/gpu_check/live.py --part pair --steps 3 --shape tiny --runs-dir {out}/runs/pair",
        LIVE,
        (AUDIT, MISMATCH),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "load",
        120,
        "bench/hand_over.py --repeats 2",
        "bench/hand_over.py --repeats 1 --device cpu --layers 0 --vocabulary 16384",
        "df /dev/shm must show 20 GB; the log says whether link, slot or load failed",
        (Goal("pull_over_pinned_copy", "CUDA does not register shared memory: ulimit -l, container", 0.8),),
    ),
    Stage(
        "trainer-7b",
        120,
        "bench/gpu_check/trainer_alone.py --shape 7b --layers 8 --runs-dir {out}/runs/trainer",
        "",
        "the log's last line; 8 of a 7B's layers need 70 GB",
        (
            PEAK,
            Goal("mfu", "make apex; FlashAttention 3; fewer activations recomputed: docs/gpu_check.md", 0.45),
        ),
        needs=TRAINING,
    ),
    Stage(
        "tests",
        160,
        "-m pytest -q -p no:cacheprovider -m gpu tests/weights/kernels tests/engine/kv tests/trainer",
        "-m pytest -q -p no:cacheprovider -m gpu --collect-only tests/engine/kv tests/trainer",
        "the log names the test; the stages behind it show what else it breaks",
        figures=False,
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "experts",
        170,
        "bench/gpu_check/live.py --part experts --steps 6 --runs-dir {out}/runs/experts",
        "bench/gpu_check/live.py --part experts --steps 3 --runs-dir {out}/runs/experts",
        LIVE,
        (AUDIT,),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "repack",
        180,
        "bench/gpu_check/live.py --part repack --steps 6 --runs-dir {out}/runs/repack",
        "bench/gpu_check/live.py --part repack --steps 4 --shape tiny --runs-dir {out}/runs/repack",
        LIVE,
        (AUDIT, Goal("moves", "no trajectory has moved: more --steps", 1)),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "keep-kv",
        180,
        "bench/gpu_check/live.py --part keep_kv --steps 8 --runs-dir {out}/runs/keep-kv",
        "bench/gpu_check/live.py --part keep_kv --steps 3 --shape tiny --runs-dir {out}/runs/keep-kv",
        LIVE,
        (AUDIT, Goal("versions_max", "no running request has met new weights: more --steps", 2)),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "resume",
        240,
        "bench/gpu_check/live.py --part resume --steps 4 --runs-dir {out}/runs/resume",
        "bench/gpu_check/live.py --part resume --steps 4 --shape tiny --runs-dir {out}/runs/resume",
        LIVE,
        (AUDIT,),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "engine-killed",
        240,
        "bench/gpu_check/live.py --part engine_killed --steps 8 --runs-dir {out}/runs/killed",
        "bench/gpu_check/live.py --part engine_killed --steps 12 --shape tiny --runs-dir {out}/runs/killed",
        LIVE,
        (AUDIT,),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "relay-killed",
        240,
        "bench/gpu_check/live.py --part relay_killed --runs-dir {out}/runs/relay",
        "bench/gpu_check/live.py --part relay_killed --shape tiny --runs-dir {out}/runs/relay",
        LIVE,
        (AUDIT,),
        needs=(*KERNELS, *TRAINING),
    ),
    Stage(
        "moves",
        200,
        "bench/kv_engines.py --model 7b --lengths 1024,8192 --repeats 1",
        "bench/kv_engines.py --model narrow --lengths 64 --repeats 1",
        "the log says at which step of a move; docs/kv.md",
        (Goal("reprefill_over_move_4k", "moves are slower than prefilling: pipeline.repack=reprefill", 1.0),),
        needs=KERNELS,
    ),
    Stage(
        "trainer-replayed",
        90,
        "bench/gpu_check/trainer_alone.py --shape 0.5b --replay {out}/runs/pair/laminar"
        " --runs-dir {out}/runs/trainer",
        "bench/gpu_check/trainer_alone.py --shape tiny --tokens 256 --steps 2"
        " --replay {out}/runs/pair/laminar --runs-dir {out}/runs/trainer",
        "it trains on what the stage before has left; if that failed, mend it first",
        (PEAK,),
        needs=TRAINING,
    ),
    Stage(
        "engine-7b",
        240,
        "bench/gpu_check/engine_alone.py --shape 7b --repeats 1 --runs-dir {out}/runs/engine-7b",
        "",
        "as for 0.5b; a 7B's weights and KV cache need 32 GB",
        needs=KERNELS,
    ),
)
