// Command sentences draws random sentences from pages and doc comments, for a reader who has not seen them
// before. It prints each sentence with what a reader of the page sees beside it: the heading, the row of the
// table, the paragraph, or the declaration. The reader marks each sentence that needs a second reading. The
// project's goal is at most 2%.
//
//	go run ./internal/tools/sentences -draw 1                # the first of the five draws of the project
//	go run ./internal/tools/sentences -seed 7 README.md ./breaker ./saga/...
//
// A draw depends only on its seed and the text, so it can be repeated. The seeds of the project's draws are
// in seeds.txt. Half of the sentences of such a draw are from README.md and docs, and half are from the doc
// comments of all modules.
package main

import (
	_ "embed"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed seeds.txt
var seeds string

func main() {
	log.SetFlags(0)
	draw := flag.Int("draw", 0, "number of a draw of the project, from 1")
	seed := flag.Uint64("seed", 20261128, "seed of the draw, if -draw is not set")
	n := flag.Int("n", 40, "number of sentences")
	flag.Parse()
	if *draw == 0 {
		all, err := collect(flag.Args())
		if err != nil {
			log.Fatal(err)
		}
		list(take(&all, *seed, *n))
		return
	}
	pages, err := collect([]string{"README.md", "docs/..."})
	if err != nil {
		log.Fatal(err)
	}
	comments, err := collect([]string{"./..."})
	if err != nil {
		log.Fatal(err)
	}
	lines := strings.Fields(seeds)
	if *draw > len(lines) {
		log.Fatalf("sentences: draw is %d: must be at most %d", *draw, len(lines))
	}
	for i, line := range lines[:*draw] { // a draw never repeats a sentence of an earlier draw
		seed, err := strconv.ParseUint(line, 10, 64)
		if err != nil {
			log.Fatal(err)
		}
		drawn := append(take(&pages, seed, *n/2), take(&comments, seed, *n-*n/2)...)
		if i == *draw-1 {
			list(drawn)
		}
	}
}

// A sentence is one sentence of a page or a doc comment.
type sentence struct {
	place, text string
	around      string // what a reader sees beside it
}

func compare(a, b sentence) int {
	return strings.Compare(a.place+": "+a.text, b.place+": "+b.text)
}

// take draws n sentences and removes them from all.
func take(all *[]sentence, seed uint64, n int) []sentence {
	rest := slices.Clone(*all)
	rand.New(rand.NewPCG(seed, 0)).Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	n = min(n, len(rest))
	*all = slices.SortedFunc(slices.Values(rest[n:]), compare)
	return rest[:n]
}

// list prints sentences with their numbers.
func list(drawn []sentence) {
	for i, s := range drawn {
		fmt.Printf("%d. %s\n   %s\n", i+1, s.place, strings.ReplaceAll(s.around, "\n", "\n   "))
		fmt.Printf("   >>> %s\n\n", s.text)
	}
}

// collect returns the sentences of files and directories, sorted. A path that ends in /... includes
// subdirectories. The path ./... includes doc comments only, not pages.
func collect(paths []string) (all []sentence, err error) {
	for _, path := range paths {
		root, deep := strings.CutSuffix(path, "/...")
		root = filepath.Clean(root)
		err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() {
				if file != root && (!deep || isSkipped(entry.Name())) {
					return filepath.SkipDir
				}
				return nil
			}
			found, err := sentencesOf(file, root != ".")
			all = append(all, found...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortFunc(all, compare)
	return all, nil
}

// isSkipped reports whether a directory contains no documentation for users of the library.
func isSkipped(name string) bool {
	return strings.HasPrefix(name, ".") || slices.Contains([]string{"internal", "testdata", "examples"}, name)
}

// sentencesOf returns the sentences of a file, each with its place. From a Go file, it returns the sentences
// of the doc comments. It reads a Markdown page only if pages is set.
func sentencesOf(file string, pages bool) ([]sentence, error) {
	switch {
	case strings.HasSuffix(file, ".go") && !strings.HasSuffix(file, "_test.go"):
		return sentencesOfGo(file)
	case strings.HasSuffix(file, ".md") && pages:
		text, err := os.ReadFile(file)
		return sentencesOfPage(file, string(text)), err
	}
	return nil, nil
}

// sentencesOfGo returns the sentences of the comments that go doc shows.
func sentencesOfGo(file string) (all []sentence, err error) {
	source, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, source, parser.ParseComments)
	if err != nil || ast.IsGenerated(f) {
		return nil, err
	}
	add := func(declared token.Pos, names []*ast.Ident, groups ...*ast.CommentGroup) {
		line, _, _ := strings.Cut(string(source[fset.Position(declared).Offset:]), "\n")
		for _, group := range groups {
			if group == nil {
				continue
			}
			place := fmt.Sprintf("%s:%d", file, fset.Position(group.Pos()).Line)
			if len(names) > 0 && !strings.HasPrefix(group.Text(), names[0].Name+" ") {
				place += ": " + names[0].Name // the field to which a comment without a subject belongs
			}
			before := "" // the paragraph before
			for _, paragraph := range strings.Split(strings.TrimSpace(group.Text()), "\n\n") {
				if !strings.HasPrefix(paragraph, "\t") && !strings.HasPrefix(paragraph, "#") {
					around := before + paragraph + "\n" + line
					all = append(all, split(place, around, reference.ReplaceAllString(paragraph, "$1"))...)
				}
				before = paragraph + "\n\n"
			}
		}
	}
	add(f.Package, nil, f.Doc)
	ast.FileExports(f)
	for _, d := range f.Decls {
		ast.Inspect(d, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				add(n.Type.Func, nil, n.Doc)
				return false
			case *ast.GenDecl:
				add(n.TokPos, nil, n.Doc)
			case *ast.TypeSpec:
				add(n.Pos(), nil, n.Doc, n.Comment)
			case *ast.ValueSpec:
				add(n.Pos(), n.Names, n.Doc, n.Comment)
			case *ast.Field:
				add(n.Pos(), n.Names, n.Doc, n.Comment)
			}
			return true
		})
	}
	return all, nil
}

var (
	marker    = regexp.MustCompile(`(?s)<!-- (table|figures|faults) -->.*?<!-- end of .*? -->`)
	fence     = regexp.MustCompile("(?s)```.*?```")
	other     = regexp.MustCompile("^(#|<|    )") // headings, pictures and code
	item      = regexp.MustCompile(`^\s*(?:- |\d+\. )`)
	tests     = regexp.MustCompile("[:.]? *`(?:Test|Fuzz)\\w+`(?:, `(?:Test|Fuzz)\\w+`)*$")
	reference = regexp.MustCompile(`\[(\*?[\w.]+)\]`)
	link      = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// sentencesOfPage returns the sentences of a page in Markdown, without code, headings and generated tables. Each item
// of a list and each cell of a table is a paragraph.
func sentencesOfPage(file, text string) (all []sentence) {
	for _, part := range []*regexp.Regexp{marker, fence} { // replace by newlines to preserve line numbers
		text = part.ReplaceAllStringFunc(text, func(s string) string {
			return strings.Repeat("\n", strings.Count(s, "\n"))
		})
	}
	var heading, before, header string // above the paragraph or the row
	var paragraph []string
	inItem := false
	start := 0
	flush := func() {
		prose := tests.ReplaceAllString(plain(strings.Join(paragraph, " ")), "")
		around := strings.TrimLeft(heading+"\n"+before+"\n"+prose, "\n")
		all = append(all, split(fmt.Sprintf("%s:%d", file, start), around, prose)...)
		if len(paragraph) > 0 && !inItem { // what precedes a list introduces each of its items
			before = prose
		}
		paragraph, inItem = nil, false
	}
	for i, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(line, "|") {
			header = ""
		}
		switch {
		case strings.TrimSpace(line) == "", other.MatchString(line):
			flush()
			if strings.HasPrefix(line, "#") {
				heading, before = line, ""
			}
			continue
		case strings.HasPrefix(line, "|"):
			flush()
			if header == "" {
				header = line
			}
			cells := strings.Split(plain(strings.Trim(line, "| ")), " | ")
			for n, cell := range cells {
				place := fmt.Sprintf("%s:%d", file, i+1)
				if n > 0 {
					place += ": " + cells[0] // the subject of the row
				}
				if len(strings.Fields(cell)) >= 6 { // a shorter cell cannot be understood without the whole row
					around := strings.TrimLeft(heading+"\n"+before+"\n"+header+"\n"+line, "\n")
					all = append(all, split(place, around, cell)...)
				}
			}
			continue
		case item.MatchString(line):
			flush()
			line = item.ReplaceAllString(line, "")
			inItem = true
		}
		if len(paragraph) == 0 {
			start = i + 1
		}
		paragraph = append(paragraph, strings.TrimSpace(line))
	}
	flush()
	return all
}

// plain returns the text of a paragraph without links and emphasis.
func plain(text string) string {
	return strings.ReplaceAll(strings.ReplaceAll(link.ReplaceAllString(text, "$1"), "**", ""), `\*`, "")
}

// split returns the sentences of a text that have at least four words, each with its place and what is around it.
func split(place, around, text string) (all []sentence) {
	words := strings.Fields(text)
	for len(words) > 0 {
		end := 1 + slices.IndexFunc(words, func(w string) bool {
			return strings.HasSuffix(strings.TrimRight(w, `*)"`), ".") && w != "e.g." && w != "i.e."
		})
		if end == 0 {
			end = len(words)
		}
		if end >= 4 {
			all = append(all, sentence{place, strings.Join(words[:end], " "), around})
		}
		words = words[end:]
	}
	return all
}
