"""The OpenMP threads of a kernel: which one runs, its part of the work, and the barrier between them."""

from ..compiler.intrinsics import call_address, compiled


@compiled
def this_thread(openmp):
    """The thread's number and the number of threads, which may be fewer than were requested."""
    return call_address(openmp.thread_number), call_address(openmp.num_threads)


@compiled
def partition(count, thread, threads):
    """The first and one past the last of the thread's items, of `count` items."""
    return count * thread // threads, count * (thread + 1) // threads


@compiled
def barrier(openmp):
    """Wait for all threads: afterwards, each thread may read what the others have written."""
    call_address(openmp.barrier)
