//go:build ignore

// Zip writes a zip file in the form in which a module proxy serves it. It reads the names of the files from standard
// input.
package main

import (
	"archive/zip"
	"bufio"
	"io"
	"log"
	"os"
)

func main() {
	out, err := os.Create(os.Args[1])
	check(err)
	archive := zip.NewWriter(out)
	names := bufio.NewScanner(os.Stdin)
	for names.Scan() {
		in, err := os.Open(names.Text())
		check(err)
		file, err := archive.Create(names.Text())
		check(err)
		_, err = io.Copy(file, in)
		check(err)
		check(in.Close())
	}
	check(names.Err())
	check(archive.Close())
	check(out.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
