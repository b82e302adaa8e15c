# Makes the target Prometheus, unless prometheus-cpp is not wanted or not there.
if(BYTEPS_WITH_PROMETHEUS STREQUAL "OFF")
  return()
endif()

if(NOT BYTEPS_PROMETHEUS_SOURCE)
  # By hand: the library's own CMake package asks for some of its dependencies that Debian's and
  # Ubuntu's do not bring.
  find_path(PROMETHEUS_INCLUDE_DIR prometheus/exposer.h)
  find_library(PROMETHEUS_PULL_LIBRARY prometheus-cpp-pull)
  find_library(PROMETHEUS_CORE_LIBRARY prometheus-cpp-core)
  # Its HTTP server, which serves the status page too.
  find_path(CIVETWEB_INCLUDE_DIR civetweb.h)
  find_library(CIVETWEB_LIBRARY civetweb)
  if(PROMETHEUS_INCLUDE_DIR AND PROMETHEUS_PULL_LIBRARY AND PROMETHEUS_CORE_LIBRARY
     AND CIVETWEB_INCLUDE_DIR AND CIVETWEB_LIBRARY)
    add_library(Prometheus INTERFACE)
    target_include_directories(Prometheus SYSTEM INTERFACE ${PROMETHEUS_INCLUDE_DIR}
                                                        ${CIVETWEB_INCLUDE_DIR})
    target_link_libraries(Prometheus INTERFACE ${PROMETHEUS_PULL_LIBRARY}
                                               ${PROMETHEUS_CORE_LIBRARY} ${CIVETWEB_LIBRARY})
  endif()
  return()
endif()

# From source, into our own objects: what we ship must run where the library is not installed.
# Not by the library's own build: it would look for an installed civetweb and zlib.
enable_language(C)
include(GenerateExportHeader)
file(GLOB prometheus_root ${BYTEPS_PROMETHEUS_SOURCE}/prometheus-cpp-*/)
file(GLOB civetweb_root ${BYTEPS_PROMETHEUS_SOURCE}/civetweb-*/)
if(NOT EXISTS ${prometheus_root}/pull/src/exposer.cc OR NOT EXISTS ${civetweb_root}/src/civetweb.c)
  message(FATAL_ERROR "BYTEPS_PROMETHEUS_SOURCE=${BYTEPS_PROMETHEUS_SOURCE} must hold one folder "
                      "prometheus-cpp-VERSION and one civetweb-VERSION")
endif()

add_library(civetweb STATIC ${civetweb_root}/src/civetweb.c ${civetweb_root}/src/CivetServer.cpp)
target_include_directories(civetweb SYSTEM PUBLIC ${civetweb_root}/include)
# Metrics are served over plain HTTP: no TLS, scripts, CGI or files.
target_compile_definitions(civetweb PRIVATE NO_SSL NO_CGI NO_FILES NO_CACHING)
target_compile_options(civetweb PRIVATE -w)
target_link_libraries(civetweb PUBLIC Threads::Threads ${CMAKE_DL_LIBS})

file(GLOB prometheus_sources ${prometheus_root}/core/src/*.cc ${prometheus_root}/core/src/detail/*.cc
                             ${prometheus_root}/pull/src/*.cc)
add_library(Prometheus STATIC ${prometheus_sources})
target_include_directories(Prometheus SYSTEM PUBLIC
  ${prometheus_root}/core/include ${prometheus_root}/pull/include
  ${CMAKE_CURRENT_BINARY_DIR}/prometheus-include
  PRIVATE ${prometheus_root}/pull/src)
foreach(part core pull)
  string(TOUPPER ${part} name)
  generate_export_header(Prometheus BASE_NAME PROMETHEUS_CPP_${name}
    EXPORT_FILE_NAME ${CMAKE_CURRENT_BINARY_DIR}/prometheus-include/prometheus/detail/${part}_export.h
    STATIC_DEFINE PROMETHEUS_CPP_${name}_STATIC_DEFINE)
endforeach()
target_compile_definitions(Prometheus PUBLIC PROMETHEUS_CPP_CORE_STATIC_DEFINE
                                             PROMETHEUS_CPP_PULL_STATIC_DEFINE)
target_compile_options(Prometheus PRIVATE -w)
target_link_libraries(Prometheus PUBLIC civetweb rt)
