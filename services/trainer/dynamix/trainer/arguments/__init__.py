"""What scripts pass, checked by type before anything is done with it.

In: values of a script, with the names that it knows them by. Out: plain numbers, or TypeError and ValueError of one
sentence each. Anything of the trainer may call these functions; they import nothing of it.
"""
