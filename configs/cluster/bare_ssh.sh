#!/bin/bash
# Several machines without a scheduler, one process each, started over ssh from the first one:
#
#   configs/cluster/bare_ssh.sh node0 node1 node2 node3 -- \
#       --config=configs/fashion_resnet.py --workdir=workdir/fashion
#
# The checkout, its .venv and --workdir must be in a folder that all machines see under this path,
# and ssh must need no password. PORT (12345) is that of the first machine; MAX_RESTARTS (0) is how
# often all start again when one fails; TFDS_DATA_DIR is passed on. The first failure, or Ctrl-C,
# ends all: a closed connection hangs up on the launcher, and its processes end with it.

set -euo pipefail

hosts=()
while (($#)) && [[ "$1" != "--" ]]; do
  hosts+=("$1")
  shift
done
if ((${#hosts[@]} == 0 || $# < 2)); then
  echo "usage: $0 HOST... -- --config=FILE [flags of python -m train]" >&2
  exit 2
fi
shift

connections=()
trap 'kill "${connections[@]}" 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM

for i in "${!hosts[@]}"; do
  # ssh joins its arguments with spaces, and a shell there reads them: so each is quoted.
  command=$(printf '%q ' \
    env "TFDS_DATA_DIR=${TFDS_DATA_DIR:-${HOME}/tensorflow_datasets}" \
    .venv/bin/python -m train.launch --cluster=configs/cluster/ethernet_10g.py \
    "--max_restarts=${MAX_RESTARTS:-0}" -- "$@" \
    "--coordinator=${hosts[0]}:${PORT:-12345}" "--num_processes=${#hosts[@]}" "--process_id=$i")
  ssh -tt -o BatchMode=yes "${hosts[i]}" "cd $(printf '%q' "$PWD") && exec ${command}" </dev/null &
  connections+=("$!")
done

for _ in "${connections[@]}"; do
  wait -n # Its status is that of whichever ended; set -e ends the others with the first failure.
done
