#!/usr/bin/env bash
# Carry a large file to a machine that takes little at a time.
#
#   bash benchmarks/carry.sh split FILE          # here: writes .carry/NAME/00, 01, ... and .carry/NAME.sum
#   bash benchmarks/carry.sh add PIECE FILE      # there, once for each piece, in any order
#   bash benchmarks/carry.sh check SUM FILE      # there, at the end
#
# A piece is written at its own place in FILE, so adding it twice does no harm.
set -euo pipefail
PIECE_MIB=54

case "${1:-}" in
split)
    folder=.carry/$(basename "$2")
    rm -rf "$folder"
    mkdir -p "$folder"
    split --bytes=${PIECE_MIB}M --numeric-suffixes --suffix-length=2 "$2" "$folder/"
    sha256sum <"$2" | cut -d' ' -f1 >"$folder.sum"
    ls -l "$folder"
    ;;
add)
    mkdir -p "$(dirname "$3")"
    number=$((10#$(basename "$2")))
    dd if="$2" of="$3" bs=1M seek=$((number * PIECE_MIB)) conv=notrunc status=none
    echo "$3: piece $number, now $(stat -c %s "$3") bytes"
    ;;
check)
    found=$(sha256sum <"$3" | cut -d' ' -f1)
    if [ "$found" != "$(cat "$2")" ]; then
        echo "$3 is damaged, or lacks a piece: its sum is $found, not $(cat "$2")" >&2
        exit 1
    fi
    echo "$3 is whole"
    ;;
*)
    sed -n '2,8p' "$0" >&2
    exit 2
    ;;
esac
