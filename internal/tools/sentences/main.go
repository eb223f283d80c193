// Command sentences draws sentences of comments, error texts aside, for somebody who has not seen the code to
// read. A reader marks each sentence that needs a second reading; the project's aim is 2%.
//
//	go run ./internal/tools/sentences -seed 1 -n 40 . ./policy ./registry
//
// The draw depends on the seed and the comments alone, so that it can be repeated.
package main

import (
	"flag"
	"fmt"
	"go/parser"
	"go/token"
	"log"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
)

func main() {
	seed := flag.Uint64("seed", 20261128, "of the draw")
	n := flag.Int("n", 40, "number of sentences")
	flag.Parse()
	var all []string
	for _, dir := range flag.Args() {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			log.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			found, err := sentencesOf(file)
			if err != nil {
				log.Fatal(err)
			}
			all = append(all, found...)
		}
	}
	slices.Sort(all)
	r := rand.New(rand.NewPCG(*seed, 0))
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for i, s := range all[:min(*n, len(all))] {
		fmt.Printf("%d. %s\n", i+1, s)
	}
}

// sentencesOf returns the sentences in the comments of a file, each with its place. Code in comments, which is
// indented, is left out.
func sentencesOf(file string) (all []string, err error) {
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, nil, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	for _, group := range f.Comments {
		var prose []string
		for line := range strings.Lines(group.Text()) {
			if line = strings.TrimRight(line, "\n"); !strings.HasPrefix(line, "\t") {
				prose = append(prose, strings.TrimSpace(line))
			}
		}
		place := fset.Position(group.Pos())
		for _, s := range split(strings.Join(prose, " ")) {
			all = append(all, fmt.Sprintf("%s:%d: %s", place.Filename, place.Line, s))
		}
	}
	return all, nil
}

// split splits a text into its sentences of at least four words.
func split(text string) (all []string) {
	words := strings.Fields(text)
	for len(words) > 0 {
		end := 1 + slices.IndexFunc(words, func(w string) bool {
			return strings.HasSuffix(w, ".") && w != "e.g." && w != "i.e."
		})
		if end == 0 {
			end = len(words)
		}
		if end >= 4 {
			all = append(all, strings.Join(words[:end], " "))
		}
		words = words[end:]
	}
	return all
}
