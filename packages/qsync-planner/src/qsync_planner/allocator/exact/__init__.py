"""The exact allocator: one mixed-integer program per device group, solved by HiGHS, with a proof of how good the plan is.

:mod:`choices` says what every operator may cost, :mod:`time_rows` and :mod:`memory_rows` what a plan must keep,
:mod:`group_program` puts them together, :mod:`program` hands them to HiGHS.  The mathematics: ``docs/design/exact-allocator.md``.
"""
