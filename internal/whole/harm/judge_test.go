package harm

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// measured returns the measurement of 1000 calls within 10 seconds.
func measured(answered int, change ...func(*Measurement)) *Measurement {
	m := &Measurement{
		Asked: 1000, Counted: 1000, Answered: answered, Sent: 1000, AskedInFault: 1000, SentInFault: 1000,
		Seconds: 10, Runs: 1, lost: 3 * s, took: slices.Repeat([]time.Duration{s}, answered),
	}
	for _, f := range change {
		f(m)
	}
	return m
}

func TestJudge(t *testing.T) {
	back := func(d time.Duration) func(*Measurement) { return func(m *Measurement) { m.Back = d } }
	sent := func(n int) func(*Measurement) { return func(m *Measurement) { m.Sent, m.SentInFault = n, n } }
	plain, patient := measured(900), map[string]*Measurement{"retryablehttp": measured(950)}
	for _, c := range []struct {
		name   string
		row    Row
		mine   *Measurement
		others map[string]*Measurement
		want   Verdict
	}{
		{"as plain", Row{}, measured(900), nil, Green},
		{"half a percent less", Row{}, measured(894), nil, Close},
		{"1% less", Row{}, measured(890), nil, Close},
		{"more than 1% less", Row{}, measured(889), nil, Red},
		{"within recovery", Row{}, measured(870, func(m *Measurement) { m.Recovering = 25 }), nil, Green},
		{"less than retries", Row{}, measured(900), map[string]*Measurement{"retries": measured(950)}, Red},
		{"less than failsafe", Row{}, measured(900), map[string]*Measurement{"failsafe": measured(950)}, Red},
		{"less than retryablehttp", Row{ID: "3/503"}, measured(900), patient, Green},
		{"less where it counts", Row{ID: "5/h1"}, measured(900), patient, Red},
		{"the budget's load", Row{}, measured(900, sent(1400)), nil, Close},
		{"more than the budget", Row{}, measured(900, sent(1401)), nil, Red},
		{"more hosts", Row{Must: Must{Hosts: 2}}, measured(900, sent(1500)), nil, Green},
		{"load only", Row{Must: Must{LoadOnly: true}}, measured(0), nil, Green},
		{"as many as asked", Row{Must: Must{SendFewer: 1}}, measured(900), nil, Red},
		{"as many at a low rate", Row{Must: Must{SendFewer: 20}}, measured(900), nil, Green},
		{"fewer than asked", Row{Must: Must{SendFewer: 1}}, measured(900, sent(900)), nil, Green},
		{"goodput", Row{Length: 10 * s, Must: Must{Goodput: 0.8, Capacity: 50}}, measured(420), nil, Green},
		{"less goodput", Row{Length: 10 * s, Must: Must{Goodput: 0.8, Capacity: 50}}, measured(390), nil, Red},
		{"lost", Row{Must: Must{LoadOnly: true, MaxLost: 0.01}}, measured(989), nil, Red},
		{"none lost", Row{Must: Must{LoadOnly: true, MaxLost: 0.01}}, measured(1000), nil, Green},
		{"one refused", Row{Must: Must{NoRefusal: true}}, measured(900, func(m *Measurement) { m.Refused = 1 }), nil, Red},
		{"late", Row{Recovery: s, Must: Must{Returns: true}}, measured(900, back(5*s)), nil, Red},
		{"in time", Row{Recovery: s, Must: Must{Returns: true}}, measured(900, back(4*s)), nil, Green},
		{"slower than plain", Row{Must: Must{P99: 0.5}}, measured(900), nil, Red},
		{"as fast as plain", Row{Must: Must{P99: 1}}, measured(900), nil, Green},
		{"twice as fast as lost calls", Row{Must: Must{P99: 0.5}}, measured(995), nil, Green},
	} {
		t.Run(c.name, func(t *testing.T) {
			others := map[string]*Measurement{Plain.Name: plain}
			for name, m := range c.others {
				others[name] = m
			}
			got, failures := c.row.Judge(Cell{10, 3 * s}, c.mine, others)
			require.Equal(t, c.want, got, failures)
			require.Equal(t, got == Red, failures != "", failures)
		})
	}
}

// TestShortPatienceDoesNotReturn has callers that cancel before a silence counts against the connection.
func TestShortPatienceDoesNotReturn(t *testing.T) {
	r := Row{Recovery: s, Must: Must{Returns: true}}
	mine := measured(900, func(m *Measurement) { m.Back = time.Minute })
	got, _ := r.Judge(Cell{10, 300 * ms}, mine, map[string]*Measurement{Plain.Name: measured(900)})
	require.Equal(t, Green, got)
}

func TestBackAfter(t *testing.T) {
	calls := func(lost ...int) (results []result) {
		for i := range 1000 { // one each 10ms
			results = append(results, result{
				at: time.Duration(i) * 10 * ms, answered: !slices.Contains(lost, i), counted: true,
			})
		}
		return results
	}
	require.Zero(t, backAfter(calls(), 2*s))
	require.Zero(t, backAfter(calls(100, 101), 2*s), "before the end of the fault")
	require.Zero(t, backAfter(calls(300), 2*s), "1%")
	require.Equal(t, s+10*ms, backAfter(calls(300, 301), 2*s))
	require.Equal(t, 3*s, backAfter(calls(250, 499, 500), 2*s), "the last of the second that lost more")
}

// TestRedRowsAreRows holds that each line of RedRows matches a row, and that only the rows that the design gives up
// are listed as lost.
func TestRedRowsAreRows(t *testing.T) {
	rows := Rows()
	for _, red := range RedRows {
		i := slices.IndexFunc(rows, func(r *Row) bool { return r.ID == red.Row })
		require.GreaterOrEqual(t, i, 0, "there is no row %s", red.Row)
		cells := regexp.MustCompile(red.Cells)
		require.True(t, slices.ContainsFunc(rows[i].Cells(), func(c Cell) bool { return cells.MatchString(c.String()) }),
			"row %s has no cell that matches %s", red.Row, red.Cells)
		if red.Package == lost {
			require.True(t, rows[i].Must.Lost, "row %s is not given up", red.Row)
			continue
		}
		_, err := os.Stat(filepath.Join("../../..", red.Package, "..", filepath.Base(red.Package)))
		require.NoError(t, err, "there is no package %s", red.Package)
	}
}

// TestRowsAreNumbered holds that each row of the table has a variant that go test runs, and that no ID occurs twice.
func TestRowsAreNumbered(t *testing.T) {
	seen := map[string]bool{}
	quick := map[string]bool{}
	for _, r := range Rows() {
		require.False(t, seen[r.ID], "row %s occurs twice", r.ID)
		seen[r.ID] = true
		if number := regexp.MustCompile(`^(\d+)/`).FindStringSubmatch(r.ID); !r.Long {
			quick[number[1]] = true
		}
	}
	require.Len(t, quick, 20)
}

func TestNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refusals := 0
		n := newNetwork(func() { refusals++ })
		client, err := n.dial(t.Context(), "tcp", "svc.test:80")
		require.NoError(t, err)
		server, err := listener{n}.Accept()
		require.NoError(t, err)
		_, err = client.Write([]byte("hello"))
		require.NoError(t, err)
		got := make([]byte, 8)
		read, err := server.Read(got)
		require.NoError(t, err)
		require.Equal(t, "hello", string(got[:read]))

		require.NoError(t, server.SetReadDeadline(time.Now().Add(s)))
		_, err = server.Read(got)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, server.SetReadDeadline(time.Time{}))

		n.Refuse("svc.test")
		_, err = n.dial(t.Context(), "tcp", "svc.test:80")
		require.ErrorContains(t, err, "connection refused")
		require.Equal(t, 1, refusals)
		other, err := n.dial(t.Context(), "tcp", "other.test:80")
		require.NoError(t, err)
		n.Accept("svc.test")

		n.DropOld()
		_, err = other.Write([]byte("lost"))
		require.NoError(t, err)
		n.DropDials(true)
		start := time.Now()
		time.AfterFunc(5*s, func() { n.DropDials(false) })
		client, err = n.dial(t.Context(), "tcp", "svc.test:80")
		require.NoError(t, err)
		require.Equal(t, 7*s, time.Since(start), "the SYN that the network did not drop")

		n.Cut()
		_, err = client.Read(got)
		require.ErrorContains(t, err, "connection reset")
		_, err = client.Write(got)
		require.ErrorContains(t, err, "broken pipe")
	})
}
