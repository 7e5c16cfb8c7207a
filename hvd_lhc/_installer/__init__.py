"""What ``python -m hvd_lhc install-horovod`` is made of.

* ``recipe``: what to build: versions, edits, flags, names (pure functions).
* ``environment``: what this machine and this Python have: frameworks, compiler, an installed Horovod.
* ``build``: sdist to wheel.
* ``progress``: what the user sees meanwhile.
* ``proof``: two processes, one allreduce.
"""
