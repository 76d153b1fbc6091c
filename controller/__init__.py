"""The controller: who is master of each storage cluster, and how that changes.

decide       what a cluster needs, from what its servers show: pure
service      looks at all clusters again and again, and carries out what was decided
moves        ends switches of shards that nobody ends
change       opens, switches and promotes: the steps, each with the promises of all who must be heard
server       what is done to one server
rejoin       what is done about a server that has what its master never got, beside all that
tail         what such a server has: found, kept, and put again
"""
