"""A forward or a backward of the engine, recorded once and replayed: the same allocations, operations and launches on
other tensors, without the Python code that decided on them.

The code of a stage depends on its specification, and on the sizes and strides of its tensors, but on none of their
values. So a run does what the last run with the same key did (`programs`). The second run with a key is seen by a
dispatch mode and by the launches of the kernels (`recorder`). What it did becomes a Python function (`program`), with
small temporaries at planned places in one memory (`slab`). The code of the engine stays the one description of what a
stage does, and runs by itself wherever anything cannot be recorded.
"""
