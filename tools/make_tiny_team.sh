#!/usr/bin/env bash
# Make the tiny team's models, questions and corpus in FOLDER, unless it holds them as the tool makes them.
#
#   bash tools/make_tiny_team.sh FOLDER
#
# The folder appears when it is complete, and is made again when the tool changed; two calls at once make it once.
# A folder that this script did not make is left alone.
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tools/shell_lib.sh
. tools/shell_lib.sh
mkdir -p "$(dirname "$folder")"
exec 8>>"$folder.lock"
flock 8
stamp=$(find tools/tiny_team -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1)
[ ! -d "$folder" ] || [ -e "$folder/.stamp" ] || exit 0
[ "$(cat "$folder/.stamp" 2>/dev/null)" != "$stamp" ] || exit 0
say "making the tiny team in $folder"
rm -rf "$folder.new"
run_group .venv/bin/python -m tools.tiny_team --out "$folder.new" 8>&- >/dev/null
echo "$stamp" >"$folder.new/.stamp"
rm -rf "$folder"
mv "$folder.new" "$folder"
