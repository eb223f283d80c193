// Gateway is a program with an LLM gateway: an HTTP server in front of two providers of a language model. It limits its
// tenants, which are its customers, and bills them by tokens. Everything runs in this process, on loopback. The
// providers are fakes. The first provider fails in several ways, one after the other, for ten seconds. One of three
// tenants floods the gateway with requests.
//
//	go run ./examples/gateway [-seed n]
//
// The program prints the results of the requests in each phase. At the end it prints how many tokens of each tenant
// were reserved, how many arrived at the tenant, and how many were charged. The last two numbers are equal.
package main

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"
)

func main() {
	seed := flag.Uint64("seed", 1, "seed for the lengths of the answers and for the streams that are cut off")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	phases, bills := run(ctx, *seed, 1500*time.Millisecond)
	report(os.Stdout, phases, bills)
}

// A phase is a period in which the first provider has a fault.
type phase struct {
	name  string
	fault fault
	counts
}

// counts has the results of the tenants' requests. Each request counts as answered, cut, limited or failed. fallbacks
// counts the requests that the second provider answered.
type counts struct {
	requests, answered, cut, limited, failed, fallbacks atomic.Int64
}

// A bill counts a tenant's tokens: the tokens that the gateway reserved, the tokens that arrived at the tenant, and the
// tokens that were charged to the tenant's monthly quota.
type bill struct {
	tenant                     string
	reserved, arrived, charged int64
}

// tenants has the number of requests per second of each tenant.
var tenants = map[string]int{"acme": 20, "birch": 20, "flood": 200}

// run sends the requests of all tenants through a gateway. Each phase lasts for phaseTime.
func run(ctx context.Context, seed uint64, phaseTime time.Duration) ([]*phase, []bill) {
	north, south := newProvider(seed), newProvider(seed+1)
	defer north.Close()
	defer south.Close()
	g := newGateway(north.URL, south.URL)
	server := httptest.NewServer(g)
	defer server.Close()

	phases := []*phase{
		{name: "healthy", fault: none},
		{name: "truncated streams", fault: truncating},
		{name: "429, retry after 1 s", fault: busy},
		{name: "200, then an error", fault: failing},
		{name: "hanging", fault: hanging},
		{name: "down", fault: down},
		{name: "healthy again", fault: none},
	}
	arrived := map[string]*atomic.Int64{} // number of tokens that arrived, by tenant
	for name := range tenants {
		arrived[name] = new(atomic.Int64)
	}
	var calls sync.WaitGroup
	random := rand.New(rand.NewPCG(seed, 0))
	for _, p := range phases {
		if ctx.Err() != nil {
			break
		}
		north.fault.Store(int32(p.fault))
		var senders sync.WaitGroup
		for name, perSecond := range tenants {
			n := int(phaseTime * time.Duration(perSecond) / time.Second)
			lengths := make([]int, n)
			for i := range lengths {
				lengths[i] = 10 + random.IntN(50)
			}
			senders.Go(func() {
				tick := time.NewTicker(time.Second / time.Duration(perSecond))
				defer tick.Stop()
				for _, length := range lengths {
					<-tick.C
					calls.Go(func() { p.send(server.URL, name, length, arrived[name]) })
				}
			})
		}
		senders.Wait()
	}
	calls.Wait()

	var bills []bill
	for _, name := range slices.Sorted(maps.Keys(tenants)) {
		bills = append(bills, bill{name, g.reserved(name), arrived[name].Load(), g.charged(name)})
	}
	return phases, bills
}

// send sends one request of a tenant, reads the stream to its end, and counts the words.
func (p *phase) send(url, tenant string, length int, arrived *atomic.Int64) {
	p.requests.Add(1)
	req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(fmt.Sprintf(`{"length": %d}`, length)))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Tenant", tenant)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.failed.Add(1)
		return
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusTooManyRequests:
		p.limited.Add(1)
		return
	case resp.StatusCode != http.StatusOK:
		p.failed.Add(1)
		return
	}
	if resp.Header.Get("Provider") != "1" {
		p.fallbacks.Add(1)
	}
	whole := false
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		switch lines.Text() {
		case "data: word":
			arrived.Add(1)
		case "data: end":
			whole = true
		}
	}
	if whole {
		p.answered.Add(1)
	} else {
		p.cut.Add(1)
	}
}

func report(w io.Writer, phases []*phase, bills []bill) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "the first provider\trequests\tanswered\tby the second\tcut off\tover limit\tfailed\t")
	for _, p := range phases {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t\n", p.name, p.requests.Load(), p.answered.Load(),
			p.fallbacks.Load(), p.cut.Load(), p.limited.Load(), p.failed.Load())
	}
	fmt.Fprintln(t, "\t\t\t\t\t\t\t\ntenant\treserved\tarrived\tcharged\t\t\t\t")
	verdict := "Each tenant pays exactly for the tokens that arrived."
	for _, b := range bills {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t\t\t\t\n", b.tenant, b.reserved, b.arrived, b.charged)
		if b.arrived != b.charged {
			verdict = "The sums differ."
		}
	}
	t.Flush()
	fmt.Fprintln(w, "\n"+verdict)
}
