"""Users: who the broker lets in, and what each may publish and listen to.

In: the table of kinds, and for each user a role, its jobs or nodes, its keys. Out: the file that the broker includes
(deploy/users/users.conf). `permissions` is what a role may do, `users_file` the file.

You may change what a role needs. What must stay: permissions are generated, so that the broker and the table agree, and
the file holds no secret.
"""
