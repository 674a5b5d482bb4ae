"""Everything about the package is in pyproject.toml. With AEGIS_COMPILE=1 what decides is compiled, and the simulator
around it: the same sources through mypyc, for the same results sooner. docs/simulate.md has figures.

Decode steps on processors are C, which is compiled wherever there is a compiler, and left out where there is none."""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

COMPILED = (
    "aegis/core/block_runs.py",
    "aegis/core/contention_guard.py",
    "aegis/core/copy_order.py",
    "aegis/core/estimators.py",
    "aegis/core/lifecycle.py",
    "aegis/core/step_terms.py",
    "aegis/core/switching.py",
    "aegis/core/views.py",
    "aegis/sim/compute_shares.py",
    "aegis/sim/copies.py",
    "aegis/sim/effects.py",
    "aegis/sim/step_costs.py",
    "aegis/sim/flows.py",
    "aegis/sim/event_queue.py",
    "aegis/sim/instance.py",
    "aegis/sim/lane_run.py",
    "aegis/sim/market.py",
    "aegis/sim/nano_batches.py",
    "aegis/sim/node_memory.py",
    "aegis/sim/noise.py",
    "aegis/sim/processor_sharing.py",
    "aegis/sim/times.py",
    "aegis/sim/timeline_semaphores.py",
    "decode/hand_overs.py",
    "decode/kv_swap.py",
    "decode/kv_arrivals.py",
    "decode/adapters.py",
    "decode/answer_lengths.py",
    "decode/batch_requests.py",
    "decode/batch_view.py",
    "decode/step_times.py",
    "decode/phases.py",
    "decode/prefill_chunks.py",
    "decode/rows.py",
    "decode/prompt_rows.py",
    "decode/core.py",
    "decode/counters.py",
    "decode/lost_peers.py",
    "decode/policies/weighted_round_robin.py",
    "decode/eviction.py",
    "decode/rotation.py",
    "decode/second_lane.py",
    "decode/sequences.py",
    "decode/slack.py",
    "decode/turn_runs.py",
    "decode/worklist.py",
    "memory/[!_]*.py",
    "memory/peers/[!_]*.py",
    "prefill/prefix_reuse.py",
    "prefill/core.py",
    "prefill/counters.py",
    "prefill/ordering.py",
    "prefill/policies/grouped_fcfs.py",
    "prefill/queue.py",
    "prefill/eviction.py",
    "proxy/routing/admission.py",
    "proxy/routing/decode_lists.py",
    "proxy/routing/first_tokens.py",
    "proxy/routing/sorted_lists.py",
    "proxy/routing/prefill_queues.py",
    "proxy/routing/demand.py",
    "proxy/routing/moves.py",
    "proxy/routing/pace.py",
    "proxy/routing/patience.py",
    "proxy/routing/router.py",
    "proxy/routing/sessions.py",
)

STEPS = Path("aegis/engine/cpu")
INSTRUCTIONS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16", "avx512vbmi", "fma")


def steps() -> Extension:
    """No module of Python: it is called by address. At run time it says whether the processor has the instructions."""
    return Extension(
        "aegis.engine.cpu._steps",
        [str(STEPS / name) for name in ("linear.c", "low_rank.c", "step.c", "threads.c")],
        depends=[str(STEPS / name) for name in ("linear.h", "low_rank.h", "threads.h", "tiles.h", "vectors.h")],
        extra_compile_args=[
            "-O3",
            "-std=gnu11",
            "-fno-math-errno",
            "-ffp-contract=off",
            *(f"-m{each}" for each in INSTRUCTIONS),
        ],
        libraries=["m"],
        optional=True,
    )


wanted = os.environ.get("AEGIS_COMPILE") == "1"
extensions = [steps()] if sys.platform == "linux" and platform.machine() == "x86_64" else []
if wanted and "egg_info" not in sys.argv:  # with which pip asks first what the build requires
    from mypyc.build import mypycify

    files = sorted(str(path) for pattern in COMPILED for path in Path().glob(pattern))
    options = ["--config-file=", "--strict", "--ignore-missing-imports", "--follow-imports=silent"]
    extensions += mypycify([*files, *options], opt_level="3", include_runtime_files=True)

setup(ext_modules=extensions, setup_requires=["mypy>=1.13"] if wanted else [])
