package sagatemporal_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/saga"
	"github.com/go-resilience/resilience/sagatemporal"
)

// A story is one of ../saga/testdata/stories.txt: the steps of a saga with their options, and lines with an event and
// its result.
type story struct {
	name, steps string
	lines       []storyLine
}

type storyLine struct{ event, result string }

// stories returns the stories that an engine can be told: those whose events come from outside. A Runner and Temporal
// both lack the events of another runner or of a parent, and time here passes by itself.
func stories(t *testing.T) (all []story) {
	t.Helper()
	text, err := os.ReadFile("../saga/testdata/stories.txt")
	require.NoError(t, err)
	for told := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		lines := strings.Split(told, "\n")
		if !strings.HasPrefix(lines[0], "# ") {
			continue // the legend
		}
		s := story{name: lines[0][2:], steps: lines[1]}
		for _, line := range lines[2:] {
			event, result, _ := strings.Cut(line, "|")
			s.lines = append(s.lines, storyLine{strings.TrimSpace(event), result})
		}
		if s.playable() {
			all = append(all, s)
		}
	}
	return all
}

var (
	needsMore = regexp.MustCompile(`\b(tx|child|quiet|reads|by=|timeout=|for=|delay=)`)
	external  = regexp.MustCompile(
		`^(go|signals( \w+)+|cancel .*|retry|skip \w+|compensate .*|\w+ (ok|refused|(fails|declined)( final)?))$`)
	pause = regexp.MustCompile(`^\+\w+$`)
	begun = regexp.MustCompile(`begin (\w+ \w+ \d+)`)
	state = regexp.MustCompile(`\[(.*)\]$`)
)

// playable reports whether an engine can be told the story. A pause before an attempt must be followed by the attempt.
func (s *story) playable() bool {
	if needsMore.MatchString(s.steps) {
		return false
	}
	for i, line := range s.lines {
		if i > 0 && strings.Contains(s.lines[i-1].result, "wake") && !pause.MatchString(line.event) {
			return false
		}
		for event := range strings.SplitSeq(line.event, " & ") {
			if !external.MatchString(event) && !pause.MatchString(event) {
				return false
			}
		}
	}
	return true
}

// A player tells a story to an engine.
type player struct {
	*testing.T
	engine saga.Engine
	handle *saga.Handle[trip]
	begins chan string           // attempts that have begun
	ends   map[string]chan error // results of attempts, by step
}

func (s *story) play(t *testing.T, engine saga.Engine, recorded func(result string) bool) {
	p := &player{T: t, engine: engine, begins: make(chan string, 100), ends: map[string]chan error{}}
	p.handle = saga.Register(engine, p.define(s.steps))
	_, err := p.handle.Start(t.Context(), "trip-1", trip{})
	require.NoError(t, err)
	for _, line := range s.lines {
		for event := range strings.SplitSeq(line.event, " & ") {
			p.happen(event, line.result)
		}
		var want, got []string
		for _, match := range begun.FindAllStringSubmatch(line.result, -1) {
			want = append(want, match[1])
			select {
			case begin := <-p.begins:
				got = append(got, begin)
			case <-time.After(30 * time.Second):
				require.Fail(t, "no attempt has begun", "after %q: want %q", line.event, want)
			}
		}
		require.ElementsMatch(t, want, got, "after %q", line.event)
		if recorded(line.result) {
			p.see(line)
		}
	}
	if last := s.lines[len(s.lines)-1]; !strings.Contains(last.result, "wake") { // or the next attempt may begin
		require.Empty(t, p.begins)
	}
}

func (p *player) define(steps string) *saga.Saga[trip] {
	sg := define()
	for text := range strings.SplitSeq(steps, ";") {
		words := strings.Fields(text)
		st := saga.Step[trip]{Name: words[0], Backoff: func(int) time.Duration { return time.Millisecond }}
		ends := make(chan error, 1)
		p.ends[st.Name] = ends
		gate, final := slices.Contains(words, "gate"), slices.Contains(words, "final")
		if !gate {
			st.Do = p.call(ends)
		}
		if !gate && !final {
			st.Undo = p.call(ends)
		}
		st.Pivot, st.Parallel = slices.Contains(words, "pivot"), slices.Contains(words, "beside")
		for _, w := range words {
			if name, is := strings.CutPrefix(w, "await="); is {
				st.Await = name
			}
			if _, err := fmt.Sscanf(w, "tries=%d", &st.Attempts); err == nil {
				st.UndoAttempts = st.Attempts
			}
		}
		sg.Steps = append(sg.Steps, st)
	}
	return sg
}

func (p *player) call(ends chan error) func(context.Context, *trip) error {
	return func(ctx context.Context, _ *trip) error {
		c := saga.CommandFrom(ctx)
		id := strings.Split(c.ID, "/") // of the saga, the step and the operation
		p.begins <- fmt.Sprintf("%s %s %d", id[2], id[1], c.Attempt)
		return <-ends // even if ctx has ended, as in the stories
	}
}

// A refusal is the error of a policy that made no call.
type refusal struct{ error }

func (refusal) Refused() bool { return true }

func (p *player) happen(event, result string) {
	words := strings.Fields(event)
	note := strings.Join(words[1:], " ")
	operation := saga.Operation{Note: note}
	switch words[0] {
	case "go":
		return
	case "signals":
		for _, name := range words[1:] {
			require.NoError(p, p.handle.Signal(p.Context(), "trip-1", name, nil))
		}
		return
	case "cancel":
		_ = p.handle.Cancel(p.Context(), "trip-1", note) // the machine has nothing to return
		return
	case "retry":
		operation.Action = saga.ActionRetry
	case "skip":
		operation.Action, operation.Step = saga.ActionSkip, words[1]
	case "compensate":
		operation.Action = saga.ActionCompensate
	default:
		if !pause.MatchString(words[0]) {
			p.end(words[0], note)
		}
		return
	}
	allowed := !strings.Contains(result, " no: ")
	require.Eventually(p, func() bool { // a Runner first releases the saga
		err := p.engine.Operate(p.Context(), "trip-1", operation)
		return (err == nil) == allowed && (allowed || errors.Is(err, saga.ErrNotAllowed))
	}, 30*time.Second, 10*time.Millisecond, event)
}

func (p *player) end(step, how string) {
	err := fmt.Errorf("%s broke", step)
	switch strings.TrimSuffix(how, " final") {
	case "ok":
		err = nil
	case "declined":
		err = saga.Declined(err)
	case "refused":
		err = refusal{err}
	case "fails":
		if how == "fails final" {
			err = saga.Permanent(err)
		}
	}
	p.ends[step] <- err
}

// see waits until the steps have the statuses of the story.
func (p *player) see(line storyLine) {
	var want, got []string
	for text := range strings.SplitSeq(state.FindStringSubmatch(line.result)[1], "; ") {
		want = append(want, strings.Fields(text)[0])
	}
	require.Eventually(p, func() bool {
		in, err := p.engine.Get(p.Context(), "trip-1")
		require.NoError(p, err)
		got = nil
		for _, st := range in.Steps {
			status := string(st.Status)
			if st.MaybeApplied {
				status += "?"
			}
			got = append(got, status)
		}
		return slices.Equal(got, want)
	}, 30*time.Second, 2*time.Millisecond, "after %q: want %q, got %q", line.event, want, &got)
}

// TestStories tells the stories to a Runner and to Temporal. In the test environment, an attempt that is canceled ends
// at once; TestServerStories tells those stories, too.
func TestStories(t *testing.T) {
	all := stories(t)
	require.GreaterOrEqual(t, len(all), 25)
	for _, s := range all {
		t.Run("Runner/"+s.name, func(t *testing.T) {
			t.Parallel()
			r := saga.NewRunner(saga.NewMemory(), saga.RunnerConfig{})
			ctx, cancel := context.WithCancel(context.Background())
			t.Cleanup(cancel)
			go func() { _ = r.Run(ctx) }()
			s.play(t, r, func(result string) bool { return strings.Contains(result, "write") })
		})
		t.Run("Temporal/"+s.name, func(t *testing.T) {
			t.Parallel()
			if slices.ContainsFunc(s.lines, func(l storyLine) bool { return strings.Contains(l.result, "of no use") }) {
				t.Skip("needs a server")
			}
			env := newEnvironment()
			s.play(t, sagatemporal.New(env, env, "sagas"), func(string) bool { return true })
		})
	}
}

func TestServerStories(t *testing.T) {
	c := server(t)
	for _, s := range stories(t) {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			name := unique("story")
			w := &restartable{t: t, client: c, queue: name}
			t.Cleanup(w.stop)
			s.play(t, sagatemporal.New(renamed{c, name + "/"}, w, name), func(string) bool { return true })
		})
	}
}
