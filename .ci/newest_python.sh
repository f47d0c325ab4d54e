#!/usr/bin/env bash
# Prints the newest Python on this machine that is newer than the given one and at least 3.12.
# Prints nothing where there is none. Usage: newest_python.sh [python3]
#
# The newest jax no longer supports the oldest Python that we do, hence 3.12. Every candidate is run,
# not only looked for: the shims of pyenv, for one, are on the path for versions that they refuse.
set -euo pipefail

# Final releases with a lock and with `venv`; prints "major.minor.micro<tab>path".
describe='
import sys, sysconfig, ensurepip, venv
major, minor, micro, level, _ = sys.version_info
if level == "final" and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(f"{major}.{minor}.{micro}\t{sys.executable}")
'

candidates() {
  local IFS=: directory
  for directory in $PATH; do
    printf '%s\n' "$directory"/python3 "$directory"/python3.[0-9] "$directory"/python3.[0-9][0-9]
  done
  local root
  root=$(pyenv root 2>/dev/null || printf '%s' "${PYENV_ROOT:-$HOME/.pyenv}")
  printf '%s\n' "$root"/versions/*/bin/python
}

default=$("${1:-python3}" -c 'import sys; print(max(sys.version_info[1], 11))')

candidates | sort -u | while read -r python; do
  [ -x "$python" ] || continue
  "$python" -c "$describe" 2>/dev/null </dev/null || true
done | sort -t. -k1,1n -k2,2n -k3,3n |
  awk -F '[.\t]' -v minor="$default" '$1 == 3 && $2 > minor' | cut -f2 | tail -n 1
