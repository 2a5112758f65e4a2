# make: builds the example. A program of your own links policy.o and pool.o in the same way.
CFLAGS ?= -O2 -Wall -Wextra
CXXFLAGS ?= -O3 -march=native -fno-math-errno -fno-trapping-math

decide: example.o policy.o pool.o
	$(CXX) -o $@ $^ -pthread

%.o: %.cpp
	$(CXX) -std=c++17 $(CXXFLAGS) -c -o $@ $<

clean:
	rm -f decide *.o

.PHONY: clean
