"""Networks of this machine's own: hosts and switches are namespaces, links are shaped."""
