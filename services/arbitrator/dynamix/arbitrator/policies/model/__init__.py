"""Model: how long a step of a given batch takes, and what the gradient noise scale is, fitted to recorded windows.

In: the times and sizes of a window. Out: `StepTime`, T(B) of a job, and the last known B_noise. Both are packed into a
policy's carry. Any policy may use them; none must.
"""
