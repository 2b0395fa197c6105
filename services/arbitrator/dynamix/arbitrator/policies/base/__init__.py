"""The base of all policies: their protocol, and the options of jobs.

In: nothing of other policies. Out: what each of them is made of. Authors import it as `policies.policy` and
`policies.options`; it is apart so that policies may lie in folders of their own.
"""
