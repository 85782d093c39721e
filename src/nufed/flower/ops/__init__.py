"""Operating a federation on Flower: processes, certificates and keys.

::

    keys.py              a certificate authority for the server, a key pair for every site
    flower_processes.py  starts Flower's commands; terminates them and their descendants
    link.py              connection to a SuperLink, and calls of its API
    superlink.py         a SuperLink, in the foreground
    supernode.py         a SuperNode, in the foreground
    submit.py            submits an app, follows its log, reports its outcome
    local.py             server and sites on this machine, with one command
    new_app.py           a new app directory from the template

Flower is run by its own commands, not imported.
"""
