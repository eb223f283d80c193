package services

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// A PgBouncer is a PgBouncer that belongs to one test. It connects to the server of [Postgres]. It has four
// connections and uses one of them for each transaction.
type PgBouncer struct {
	Addr string

	t    testing.TB
	args []string
	cmd  *exec.Cmd
}

// NewPgBouncer starts a PgBouncer for a database of the server, on a free port of the loopback interface. The
// PgBouncer ends with the test. Any user may connect.
func NewPgBouncer(t testing.TB, database string) *PgBouncer {
	t.Helper()
	config, err := pgx.ParseConfig(Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("pgbouncer"); err != nil {
		missing(t, "the program pgbouncer", err)
	}
	p := &PgBouncer{t: t, Addr: FreeAddr(t)}
	_, port, _ := net.SplitHostPort(p.Addr)
	password := ""
	if config.Password != "" {
		password = " password='" + config.Password + "'"
	}
	path := filepath.Join(t.TempDir(), "pgbouncer.ini")
	if err := os.WriteFile(path, fmt.Appendf(nil, `[databases]
%s = host=%s port=%d user=%s%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
`, database, config.Host, config.Port, config.User, password, port), 0o644); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() == 0 { // PgBouncer does not run as root
		p.args = append(p.args, "-u", "nobody")
	}
	p.args = append(p.args, path)
	t.Cleanup(p.Kill)
	p.Start()
	return p
}

// Start starts the PgBouncer after Kill and waits until it listens.
func (p *PgBouncer) Start() {
	p.t.Helper()
	p.cmd = exec.Command("pgbouncer", p.args...)
	out := new(bytes.Buffer)
	p.cmd.Stderr = out
	if err := p.cmd.Start(); err != nil {
		p.t.Fatalf("pgbouncer: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", p.Addr)
		if err == nil {
			_ = conn.Close()
			return
		}
		if ctx.Err() != nil {
			p.t.Fatalf("pgbouncer at %s cannot be used: %v\n%s", p.Addr, err, out)
		}
		time.Sleep(25 * time.Millisecond)
	}
}

// Kill kills the PgBouncer, which ends all its connections.
func (p *PgBouncer) Kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}
