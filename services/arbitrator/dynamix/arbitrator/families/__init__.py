"""Families: results of a run, stored for the next run of its family.

In: a run's last action, whose carry is all that its policy knows. Out: a version of the family's profile in PROFILES,
which the next job of the family begins with. `profile` makes and reads profiles (pure), `source` finds the one that a
generation begins with; `deciding.family_ends` stores one when a run is over.

You may change what a profile holds, and then `PROFILE_FORMAT`. What must stay: a generation's first action holds the
profile that it began with, so that nothing else is needed to decide it again.
"""
