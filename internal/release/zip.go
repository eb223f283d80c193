//go:build ignore

// Zip writes the files whose names it reads into a zip file, as a module proxy serves it.
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
