"""The public names of ``verl.utils.profiler`` under the address older user code imports them from."""

from verl.utils.profiler import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer

__all__ = ["GPUMemoryLogger", "log_gpu_memory_usage", "marked_timer", "simple_timer"]
