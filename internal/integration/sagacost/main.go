// Command sagacost measures the cost of sagas: the CPU time of the Go process and of the database, the commits, the
// statements and the WAL. It also measures how long Claim, Counts and Heartbeat take with many definitions. With
// -base, it measures this commit and another commit of the repository in turns, and prints the ratios of the medians.
//
//	go run ./sagacost -base 2edf03b
//	go run ./sagacost -what claims -definitions 1,10,100,500,1500 -waiting 100000
//
// Run it on a machine that has no other work.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

var (
	databases = flag.String("databases", "postgres,mysql,sqlite", "which databases")
	what      = flag.String("what", "plain,idempotent", "plain: five steps; idempotent: that share a record; "+
		"drain, drain-idempotent: all due at once; idle: a minute of a runner; claims: Claim, Counts and Heartbeat")
	sagas       = flag.Int("sagas", 5000, "how many sagas run")
	definitions = flag.String("definitions", "1", "among how many definitions")
	waiting     = flag.Int("waiting", 0, "how many sagas are there besides, and wait for a signal")
	keep        = flag.Duration("keep", 0, "how long sagas that have ended are kept; 0: all of them")
	processes   = flag.Int("processes", 1, "how many runners, each with a pool of its own")
	rounds      = flag.Int("rounds", 5, "how often each is measured")
	base        = flag.String("base", "", "the commit to compare with")
	once        = flag.Bool("once", false, "measure once, and print JSON")
)

// A setup is the setup of one measurement.
type setup struct {
	Database    string
	What        string
	Definitions int
}

// figures are measured values by name, such as "Go CPU, us a saga".
type figures map[string]float64

func main() {
	flag.Parse()
	log.SetFlags(0)
	var setups []setup
	for _, db := range strings.Split(*databases, ",") {
		for _, w := range strings.Split(*what, ",") {
			for _, n := range strings.Split(*definitions, ",") {
				n, err := strconv.Atoi(n)
				if err != nil || n < 1 {
					log.Fatal("-definitions: ", n, err)
				}
				setups = append(setups, setup{db, w, n})
			}
		}
	}
	if *once {
		got, err := measure(context.Background(), setups[0])
		if err != nil {
			log.Fatal(err)
		}
		_ = json.NewEncoder(os.Stdout).Encode(got)
		return
	}
	dir, err := os.MkdirTemp("", "sagacost")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := compare(dir, setups); err != nil {
		log.Print(err)
	}
}

// compare measures this commit and the base commit in turns, and prints a table.
func compare(dir string, setups []setup) error {
	programs := []string{filepath.Join(dir, "now")}
	const folder = "github.com/go-resilience/resilience/internal/integration/sagacost"
	if out, err := exec.Command("go", "build", "-o", programs[0], folder).CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w: %s", err, out)
	}
	if *base != "" {
		tree := filepath.Join(dir, "tree")
		then, err := buildBase(tree, filepath.Join(dir, "then"))
		defer func() { _ = exec.Command("git", "worktree", "remove", "--force", tree).Run() }()
		if err != nil {
			return err
		}
		programs = append(programs, then)
	}
	fmt.Println("| database | what | definitions | figure | now | base | ratio |\n|---|---|---|---|---|---|---|")
	for _, s := range setups {
		all := make([]map[string][]float64, len(programs))
		for range *rounds {
			for i, program := range programs {
				got, err := runOnce(program, s)
				if err != nil {
					return err
				}
				for name, v := range got {
					if all[i] == nil {
						all[i] = map[string][]float64{}
					}
					all[i][name] = append(all[i][name], v)
				}
			}
		}
		for _, name := range slices.Sorted(maps.Keys(all[0])) {
			now := median(all[0][name])
			row := fmt.Sprintf("| %s | %s | %d | %s | %.4g |", s.Database, s.What, s.Definitions, name, now)
			if len(all) > 1 && len(all[1][name]) > 0 {
				then := median(all[1][name])
				row += fmt.Sprintf(" %.4g | %.2f |", then, now/then)
			} else {
				row += " | |"
			}
			fmt.Println(row)
		}
	}
	return nil
}

// buildBase compiles this program for the base commit, in a separate work tree.
func buildBase(tree, program string) (string, error) {
	if out, err := exec.Command("git", "worktree", "add", "--detach", tree, *base).CombinedOutput(); err != nil {
		return "", fmt.Errorf("git worktree: %w: %s", err, out)
	}
	root, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return "", err
	}
	const folder = "internal/integration/sagacost"
	if err := os.RemoveAll(filepath.Join(tree, folder)); err != nil {
		return "", err
	}
	from := os.DirFS(filepath.Join(strings.TrimSpace(string(root)), folder))
	if err := os.CopyFS(filepath.Join(tree, folder), from); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-o", program, ".")
	cmd.Dir = filepath.Join(tree, folder)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", *base, err, out)
	}
	return program, nil
}

func runOnce(program string, s setup) (got figures, err error) {
	cmd := exec.Command(program, "-once", "-databases", s.Database, "-what", s.What,
		"-definitions", fmt.Sprint(s.Definitions), "-sagas", fmt.Sprint(*sagas), "-waiting", fmt.Sprint(*waiting),
		"-processes", fmt.Sprint(*processes), "-keep", keep.String())
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	return got, json.Unmarshal(out, &got)
}

func median(v []float64) float64 {
	slices.Sort(v)
	return (v[len(v)/2] + v[(len(v)-1)/2]) / 2
}
