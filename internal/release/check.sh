#!/usr/bin/env bash
# Packs the modules as they are committed, serves them from a local module proxy in the
# version $1, and builds and runs new programs that require them from there, without go.work
# and without replace, as users do: all modules, each alone, and each adapter with the root
# of the next version. See CONTRIBUTING.md.
set -euo pipefail
version=${1:-v0.1.0}
next=${version%.*}.$((${version##*.} + 1))
root=github.com/go-resilience/resilience
cd "$(git -C "$(dirname "$0")" rev-parse --show-toplevel)"
published=$(git ls-files '*/go.mod' | xargs -n1 dirname | grep -v -e '^examples$' -e '^internal/')
nested=$(git ls-files '*/go.mod' | xargs -n1 dirname)

work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cache=$(go env GOMODCACHE)
GOPROXY="file://$work/proxy,file://$cache/cache/download,$(go env GOPROXY)"
export GOPROXY GOMODCACHE="$work/cache" GONOSUMDB="$root,$root/*" GOFLAGS=-mod=mod GOWORK=off

# pack MODULE DIR VERSION puts the module whose files are in DIR into the proxy.
pack() {
	local version=$3 into="$work/proxy/$1/@v" files="$work/zip/$1@$3"
	mkdir -p "$into" "$(dirname "$files")"
	cp -r "$2" "$files"
	cp "$files/go.mod" "$into/$version.mod"
	printf '{"Version":"%s","Time":"2000-01-01T00:00:00Z"}\n' "$version" > "$into/$version.info"
	echo "$version" >> "$into/list"
	(cd "$work/zip" && find "$1@$version" -type f | go run "$OLDPWD/internal/release/zip.go" "$into/$version.zip")
	rm -r "${work:?}/zip"
}

mkdir "$work/tree"
git archive HEAD | tar -x -C "$work/tree"
for dir in $published; do
	(cd "$work/tree/$dir"
		go mod edit -dropreplace "$root" -require "$root@$version"
		for other in $published; do go mod edit -dropreplace "$root/$other"; done)
	pack "$root/$dir" "$work/tree/$dir" "$version"
done
for dir in $nested; do rm -r "${work:?}/tree/$dir"; done
pack "$root" "$work/tree" "$version"
pack "$root" "$work/tree" "$next"

# imports DIR prints an import of each package of the module in DIR that can be imported.
imports() {
	local package inner
	git ls-files "$1/*.go" | grep -v -e _test.go -e testdata/ | xargs -n1 dirname | sort -u | while read -r package; do
		inner=$package
		while [ "$inner" != . ] && [ ! -f "$inner/go.mod" ]; do inner=$(dirname "$inner"); done
		case /$package/ in */internal/*) continue ;; esac
		[ "$inner" = "$1" ] || continue
		if [ "$package" = . ]; then echo "	_ \"$root\""; else echo "	_ \"$root/$package\""; fi
	done
}

# user MODULE@VERSION... reads imports, and builds and runs a program with them that requires the modules.
user() {
	rm -rf "$work/user"
	mkdir "$work/user"
	{ echo 'package main'; echo 'import ('; cat; echo ')'; echo 'func main() {}'; } > "$work/user/main.go"
	(cd "$work/user"
		go mod init example.com/user 2> /dev/null
		for module; do go mod edit -require "$module"; done
		go mod tidy
		go vet ./...
		go run .
		if grep -q replace go.mod; then echo "a replace is in the user's go.mod" >&2; exit 1; fi
		for module; do grep -q "${module/@/ }" go.mod; done
		echo "$(grep -c '^	_ ' main.go) packages build from a local module proxy, with $(grep -c ' v' go.mod) modules required: $*")
}

imports . | user "$root@$version"
for dir in $published; do
	imports "$dir" | user "$root/$dir@$version"
	{ imports .; imports "$dir"; } | user "$root/$dir@$version" "$root@$next"
done
{ for dir in . $published; do imports "$dir"; done; } | user "$root@$version" $(for dir in $published; do echo "$root/$dir@$version"; done)
