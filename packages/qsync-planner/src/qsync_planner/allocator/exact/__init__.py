"""The exact allocator: a mixed-integer program per device group, solved by stages or by HiGHS, with a proof of how good plans are.

:mod:`choices` says what every operator may cost, :mod:`time_rows` and :mod:`memory_rows` what a plan must keep,
:mod:`group_program` puts them together, :mod:`staged` solves them by stages, and :mod:`program` hands them to HiGHS.  The
mathematics: ``docs/design/exact-allocator.md``.
"""
