"""The edits that make Horovod 0.28.1, released in 2023, build against the frameworks of today, and those that mend it.

Each edit is data: a file of the unpacked sdist, a text that must be found there exactly `count` times, what
replaces it, and why. `apply` refuses to go on where a text is not found as often as expected, so that an edit
that no longer fits is never skipped in silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from hvdkit.errors import RunError


@dataclass(frozen=True)
class Edit:
    """Replace `anchor` by `replacement` in `file` (relative to the source's root)."""

    file: str
    anchor: str
    replacement: str
    reason: str
    count: int = 1


CXX17 = (
    Edit(
        file="CMakeLists.txt",
        anchor="set(CMAKE_CXX_STANDARD 14)",
        replacement="set(CMAKE_CXX_STANDARD 17)",
        reason="the headers of torch >= 2.1 need C++17",
    ),
    Edit(
        file="horovod/torch/CMakeLists.txt",
        anchor="set(CMAKE_CXX_STANDARD 14)",
        replacement="set(CMAKE_CXX_STANDARD 17)",
        reason="the headers of torch >= 2.1 need C++17",
    ),
)

MISSING_INCLUDES = (
    Edit(
        file="horovod/common/common.h",
        anchor="#include <memory>\n#include <string>\n",
        replacement="#include <memory>\n#include <stdexcept>\n#include <string>\n",
        reason="gcc >= 13 no longer brings <stdexcept> along with other headers",
    ),
    Edit(
        file="horovod/common/group_table.h",
        anchor="#include <queue>\n#include <unordered_map>\n",
        replacement="#include <queue>\n#include <string>\n#include <unordered_map>\n",
        reason="gcc >= 13 no longer brings <string> along with other headers",
    ),
)

PROCESS_SET_INTERFACE = Edit(
    file="horovod/common/gloo/gloo_context.cc",
    anchor=(
        'no rendezvous server provided, assuming single process execution";\n'
        "  }\n"
        "\n"
        "  attr device_attr;\n"
        "  device_attr.iface = gloo_iface_;\n"
    ),
    replacement=(
        'no rendezvous server provided, assuming single process execution";\n'
        "  }\n"
        "\n"
        "  gloo_iface_ = global_context.gloo_iface_;\n"
        "  attr device_attr;\n"
        "  device_attr.iface = gloo_iface_;\n"
    ),
    reason=(
        "GlooContext::InitializeForProcessSet opened its device on its own empty interface name, so ranks on hosts "
        "whose name resolves to a loopback address could not reach each other"
    ),
)

NO_CUDA_IN_CPU_BUILDS = (
    Edit(
        file="CMakeLists.txt",
        anchor="include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        replacement=(
            "include(CheckLanguage)\n"
            "if(DEFINED HOROVOD_GPU_ALLREDUCE)\n"
            "check_language(CUDA)\n"
            "endif()\n"
            "if(DEFINED HOROVOD_GPU_ALLREDUCE AND NOT CMAKE_CUDA_COMPILER)\n"
        ),
        reason="a CPU build needs no CUDA compiler: do not look for one, nor fail over one that is half installed",
    ),
    Edit(
        file="cmake/Modules/FindPytorch.cmake",
        anchor='string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
        replacement=(
            'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\nif(NOT HAVE_CUDA)\n    set(Pytorch_CUDA FALSE)\nendif()\n'
        ),
        reason="pip's default torch is a CUDA build; without a GPU its CUDA parts must not be asked for",
    ),
)

SHORTER_COMPILE = (
    Edit(
        file="CMakeLists.txt",
        anchor="# Add architecture specific optimization flags\n",
        replacement=(
            'string(REPLACE "-g" "" CMAKE_C_FLAGS_RELWITHDEBINFO "${CMAKE_C_FLAGS_RELWITHDEBINFO}")\n'
            'string(REPLACE "-g" "" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n'
            "\n"
            "# Add architecture specific optimization flags\n"
        ),
        reason="debug information takes a good part of the compile time and most of the library's size",
    ),
    Edit(
        file="CMakeLists.txt",
        anchor="    add_subdirectory(third_party/gloo)\n",
        replacement="    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)\n",
        reason="a framework built as C++17 links its own copy of Gloo; this one is then built for nothing",
    ),
)

_FEW_UNITS = (
    "most of the compile time goes into reading the same headers again for each of sixty small sources; a few large "
    "ones that include them (CMake's unity build) take a fraction of it, with the same optimization"
)


def _together(framework: str, target: str, sources: str) -> tuple[Edit, Edit]:
    """Compile the library of one framework in few units; the longest of them, the binding's own, first."""
    file = f"horovod/{framework}/CMakeLists.txt"
    library, prefix = (
        f"add_library(${{{target}}} SHARED ",
        f'set_target_properties(${{{target}}} PROPERTIES PREFIX "")\n',
    )
    return (
        Edit(file, f"{library}${{SOURCES}} ${{{sources}}})", f"{library}${{{sources}}} ${{SOURCES}})", _FEW_UNITS),
        Edit(file, prefix, f"{prefix}compile_together(${{{target}}})\n", _FEW_UNITS),
    )


FEW_UNITS = (
    Edit(
        file="CMakeLists.txt",
        anchor="# TF\nadd_subdirectory(horovod/tensorflow)\n",
        replacement=(
            "# One unit each for horovod/common, for the folders below it, and for the framework's binding.\n"
            "function(compile_together TARGET)\n"
            "    if(HAVE_MPI OR HAVE_CUDA OR HAVE_ROCM OR HAVE_CCL)\n"
            "        return()\n"
            "    endif()\n"
            "    get_target_property(FILES ${TARGET} SOURCES)\n"
            "    foreach(FILE IN LISTS FILES)\n"
            "        set(GROUP binding)\n"
            '        if(FILE MATCHES "/horovod/common/[^/]+$")\n'
            "            set(GROUP common)\n"
            '        elseif(FILE MATCHES "/horovod/common/")\n'
            "            set(GROUP operations)\n"
            "        endif()\n"
            "        set_source_files_properties(${FILE} PROPERTIES UNITY_GROUP ${GROUP})\n"
            "    endforeach()\n"
            "    set_target_properties(${TARGET} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)\n"
            "endfunction()\n"
            "\n"
            "# TF\n"
            "add_subdirectory(horovod/tensorflow)\n"
        ),
        reason=f"{_FEW_UNITS}; builds with MPI or for GPUs have sources that nobody has tried together",
    ),
    Edit(
        file="third_party/gloo/gloo/CMakeLists.txt",
        anchor="add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})\n",
        replacement=(
            "add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})\n"
            "if(NOT HAVE_MPI)\n"
            "  set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 18)\n"
            '  set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/allreduce.cc" PROPERTIES\n'
            "    SKIP_UNITY_BUILD_INCLUSION ON)\n"
            "endif()\n"
        ),
        reason=f"{_FEW_UNITS}; its 37 sources become three, since names in allreduce.cc clash with the others'",
    ),
    *_together("tensorflow", "TF_TARGET_LIB", "TF_SOURCES"),
    *_together("torch", "PYTORCH_TARGET_LIB", "PYTORCH_SOURCES"),
    *_together("mxnet", "Mxnet_TARGET_LIB", "Mxnet_SOURCES"),
)

NO_XLA_COLLECTIVES = Edit(
    file="horovod/tensorflow/CMakeLists.txt",
    anchor='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
    replacement="",
    reason="a header it needs is missing from TensorFlow's wheel since 2.16; only XLA-compiled collectives are lost",
)

NAME_READ_BEFORE_IT_GOES = Edit(
    file="horovod/common/operations.cc",
    anchor=(
        "  Status status = process_set.tensor_queue.AddToTensorQueue(e, message);\n"
        "  if (status.ok()) {\n"
        "    LOG(TRACE, horovod_global.global_controller->GetRank())\n"
        '        << "Enqueued " << name;\n'
        "  }\n"
        "  return status;\n"
    ),
    replacement=(
        "  LOG(TRACE, horovod_global.global_controller->GetRank())\n"
        '      << "Enqueued " << name;\n'
        "  return process_set.tensor_queue.AddToTensorQueue(e, message);\n"
    ),
    reason=(
        "once queued, a broadcast may be over before this function goes on; MXNet then frees the operation and with it "
        "the name, which was read for a log line nonetheless: a segmentation fault in one start of a hundred"
    ),
    count=3,
)

_WAKES_WHEN_ASKED = (
    "HOROVOD_IDLE_CYCLE_TIME, in milliseconds: with nothing to reduce, the background thread sleeps so long, or until "
    "a tensor comes; as released it wakes each HOROVOD_CYCLE_TIME and asks all ranks, which takes time from the cores "
    "that the network computes on"
)

WAKE_ON_ENQUEUE = (
    Edit(
        file="horovod/common/tensor_queue.h",
        anchor="  bool IsTensorPresentInTable (const std::string& tensor_name) const;\n",
        replacement=(
            "  bool IsTensorPresentInTable (const std::string& tensor_name) const;\n"
            "\n"
            "  // Whether a tensor waits for its collective.\n"
            "  bool HasTensors() const;\n"
            "\n"
            "  // Sleeps until Wake() is called, or was since the last call, at most so long.\n"
            "  static void Rest(std::chrono::steady_clock::duration at_most);\n"
            "  static void Wake();\n"
        ),
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/tensor_queue.h",
        anchor="#include <iostream>\n#include <mutex>\n",
        replacement="#include <chrono>\n#include <iostream>\n#include <mutex>\n",
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/tensor_queue.cc",
        anchor="// Add a TensorTableEntry as well as its message to the queue.\n",
        replacement=(
            "namespace {\n"
            "std::mutex wake_mutex;\n"
            "std::condition_variable wake_condition;\n"
            "bool woken = false;\n"
            "} // namespace\n"
            "\n"
            "bool TensorQueue::HasTensors() const {\n"
            "  std::lock_guard<std::mutex> guard(mutex_);\n"
            "  return !tensor_table_.empty();\n"
            "}\n"
            "\n"
            "void TensorQueue::Rest(std::chrono::steady_clock::duration at_most) {\n"
            "  std::unique_lock<std::mutex> lock(wake_mutex);\n"
            "  wake_condition.wait_for(lock, at_most, [] { return woken; });\n"
            "  woken = false;\n"
            "}\n"
            "\n"
            "void TensorQueue::Wake() {\n"
            "  {\n"
            "    std::lock_guard<std::mutex> guard(wake_mutex);\n"
            "    woken = true;\n"
            "  }\n"
            "  wake_condition.notify_one();\n"
            "}\n"
            "\n"
            "// Add a TensorTableEntry as well as its message to the queue.\n"
        ),
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/tensor_queue.cc",
        anchor="#include <assert.h>\n",
        replacement="#include <assert.h>\n#include <condition_variable>\n",
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/tensor_queue.cc",
        anchor="  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        replacement="  message_queue_.push(std::move(message));\n  Wake();\n  return Status::OK();\n",
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/tensor_queue.cc",
        anchor="    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        replacement="    message_queue_.push(std::move(messages[i]));\n  }\n  Wake();\n  return Status::OK();\n",
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/operations.cc",
        anchor="bool RunLoopOnce(HorovodGlobalState& state) {\n",
        replacement=(
            "// Where HOROVOD_IDLE_CYCLE_TIME is given, sleeps until there is something to do. Returns whether it is.\n"
            "bool RestUntilAsked(HorovodGlobalState& state) {\n"
            '  auto idle_cycle_time = std::getenv("HOROVOD_IDLE_CYCLE_TIME");\n'
            "  long idle_ms = idle_cycle_time ? std::strtol(idle_cycle_time, nullptr, 10) : 0;\n"
            "  if (idle_ms <= 0) {\n"
            "    return false;\n"
            "  }\n"
            "  for (auto id : state.process_set_table.Ids()) {\n"
            "    auto& process_set = state.process_set_table.Get(id);\n"
            "    if (process_set.initialization_done && process_set.tensor_queue.HasTensors()) {\n"
            "      // Other ranks were not ready: the next cycle waits for them.\n"
            "      idle_ms = 1;\n"
            "    }\n"
            "  }\n"
            "  if (!state.shut_down) {\n"
            "    TensorQueue::Rest(std::chrono::milliseconds(idle_ms));\n"
            "  }\n"
            "  state.last_cycle_start = std::chrono::steady_clock::now();\n"
            "  return true;\n"
            "}\n"
            "\n"
            "bool RunLoopOnce(HorovodGlobalState& state) {\n"
        ),
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/operations.cc",
        anchor="  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n",
        replacement=(
            "  if (!RestUntilAsked(state) && sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        ),
        reason=_WAKES_WHEN_ASKED,
    ),
    Edit(
        file="horovod/common/operations.cc",
        anchor="    horovod_global.shut_down = true;\n",
        replacement="    horovod_global.shut_down = true;\n    TensorQueue::Wake();\n",
        reason=_WAKES_WHEN_ASKED,
    ),
)

TIMELINE_WRITER_SLEEPS = Edit(
    file="horovod/common/timeline.cc",
    anchor="    // Allow scheduler to schedule other work for this core.\n    std::this_thread::yield();\n",
    replacement=(
        "    // Records wait in a queue of a million; a millisecond is soon enough for a file.\n"
        "    std::this_thread::sleep_for(std::chrono::milliseconds(1));\n"
    ),
    reason="the timeline's writer never sleeps, so it takes a core from a rank for as long as the rank lives",
)

HALVES_ASSIGNED = Edit(
    file="third_party/gloo/gloo/types.h",
    anchor="    return !(*this == rhs.x);\n",
    replacement="    return x != rhs.x;\n",
    reason=(
        "a float16 was not assigned a number that was its own bits, taken as a number: 0.2228, whose bits are 13089, "
        "about 13088, stayed what it was where 0.2228 + 13088 was added up into it"
    ),
)

_ALWAYS = (
    *CXX17,
    *MISSING_INCLUDES,
    PROCESS_SET_INTERFACE,
    *NO_CUDA_IN_CPU_BUILDS,
    *SHORTER_COMPILE,
    *FEW_UNITS,
    *WAKE_ON_ENQUEUE,
    TIMELINE_WRITER_SLEEPS,
    HALVES_ASSIGNED,
)

# One list per runtime; pins.py holds TensorFlow at a version above 2.16.
EDITS: dict[str, tuple[Edit, ...]] = {
    "pytorch": _ALWAYS,
    "tensorflow": (*_ALWAYS, NO_XLA_COLLECTIVES),
    "mxnet": (*_ALWAYS, NAME_READ_BEFORE_IT_GOES),
}


def apply(source: Path, edits: Iterable[Edit]) -> None:
    """Apply `edits` to the unpacked sdist in `source`, in order.

    Raises RunError, before the file is changed, where an edit's file is missing or its anchor is not there
    exactly as often as expected.
    """
    for edit in edits:
        path = source / edit.file
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"{path}: cannot be read ({error.strerror}), so an edit does not fit this Horovod: {edit.reason}"
            ) from error
        found = text.count(edit.anchor)
        if found != edit.count:
            raise RunError(
                f"{path}: {edit.anchor.strip()!r} found {found} times, expected {edit.count}; "
                f"an edit does not fit this Horovod: {edit.reason}"
            )
        path.write_text(text.replace(edit.anchor, edit.replacement), encoding="utf-8")


def fingerprint(edits: Iterable[Edit]) -> str:
    """SHA-256, in hex, of the edits' whole content: another edit, another wheel."""
    return hashlib.sha256(json.dumps([astuple(edit) for edit in edits]).encode()).hexdigest()
